"""What users do beside `model(x)`: under TorchDDPPlugin the replicas stay alike and equal to the serial
model, or it raises.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from tests.booster.plans import launch
from tests.engine.plans import logged

Backward = Callable[[Tensor], None]
Habit = Callable[["Net", Tensor, Any, Backward], None]


class Net(nn.Module):
    """Two layers and a head, called by several names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)
        self.reentrant = False

    def encode(self, x: Tensor, skip: bool = False) -> Tensor:
        if skip:
            return self.encoder(x)
        if self.reentrant:
            x = checkpoint(self.encoder, x.requires_grad_(), use_reentrant=True)
            return checkpoint(lambda h: self.middle(h).tanh(), x, use_reentrant=True)
        return self.middle(self.encoder(x)).tanh()

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.head(self.encode(x, skip))

    def compute_loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def unwrap(self) -> Net:
        return self


def _call(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model(x).square().mean())


def _method(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model.compute_loss(x))


def _part(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model.encode(x).square().mean())


def _inner(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model.unwrap()(x).square().mean())


def _twice(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    backward(loss)


def _two_forwards(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    first, second = model(x).square().mean(), model(x + 1).square().mean()
    backward(first)
    backward(second)


def _call_and_method(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model(x).square().mean() + model.encode(2 * x).mean() + model.head.weight.norm())
    backward(model.encode(x).square().mean())


def _clip(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    backward(model.compute_loss(x))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # sees averaged gradients


def _penalty(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    backward(out.square().mean() + grad.square().mean())


def _evaluation_between(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    out = model(x)
    with torch.no_grad():
        model(x + 1)
    backward(out.square().mean())
    model(x)  # with a graph that nobody uses


def _failed(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("on purpose")

    hidden = model.encode(x)
    hidden.register_hook(fail)
    loss = model.head(hidden).mean()
    with pytest.raises(ValueError, match="on purpose"):
        backward(loss)  # in the middle, with one gradient noted
    optimizer.zero_grad()
    backward(model.compute_loss(x))


def _by_hand(model: Net, x: Tensor, optimizer: Any, backward: Backward) -> None:
    params = list(model.parameters())
    grads = torch.autograd.grad(model(x).square().mean(), params)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


HABITS: dict[str, Habit] = {
    habit.__name__[1:]: habit
    for habit in (
        *(_call, _method, _part, _inner, _twice, _two_forwards),
        *(_call_and_method, _clip, _penalty, _evaluation_between, _failed, _by_hand),
    )
}
QUIET = {"call", "penalty", "evaluation_between"}  # DDP sees everything


def _net(reentrant: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.reentrant = reentrant
    return model


def _serial(model: Net, habit: Habit, x: Tensor, steps: int = 3) -> Net:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        habit(model, x + step, optimizer, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()
    return model


def _data() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def _assert_alike(model: nn.Module, expected: nn.Module | None = None) -> None:
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p.detach()), f"{name} differs between the replicas"
    for p, q in zip(model.parameters(), expected.parameters() if expected is not None else (), strict=False):
        torch.testing.assert_close(p.detach().cpu(), q.detach())


def _boost(
    model: nn.Module,
    extra: tuple[Tensor, ...] = (),
    precision: Any = None,
    device: str = "cpu",
    **options: Any,
) -> Any:
    booster = Booster(device=device, plugin=TorchDDPPlugin(**options), mixed_precision=precision)
    optimizer = torch.optim.SGD([*model.parameters(), *extra], lr=0.3, momentum=0.9)
    boosted, optimizer, *_ = booster.boost(model, optimizer)  # type: ignore[assignment]
    return booster, boosted, optimizer


def _train(rank: int, world_size: int, name: str, reentrant: bool = False, **options: Any) -> None:
    booster, model, optimizer = _boost(_net(reentrant), **options)
    x = _data()[rank::world_size].to(options.get("device"))
    with logged() as messages:
        for step in range(3):
            HABITS[name](model, x + step, optimizer, lambda loss: booster.backward(loss, optimizer))
            optimizer.step()
            optimizer.zero_grad()
    if "precision" in options:
        _assert_alike(model)
    else:
        _assert_alike(model, _serial(_net(reentrant), HABITS[name], _data()))
    said = any("came past DDP" in message for message in messages)
    assert not (name in QUIET and said), f"{name}: DDP saw it, and yet it was averaged again"


def _all_habits(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name in sorted(HABITS, key=lambda name: name not in QUIET):  # the message comes once
        _train(rank, world_size, name)


def test_equal_to_the_serial_model() -> None:
    spawn(_all_habits, 2)


def _on_gpu(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    for name in HABITS:
        _train(rank, world_size, name, device="cuda")
    _train(rank, world_size, "method", device="cuda", precision="fp16")
    _train(rank, world_size, "twice", device="cuda", static_graph=True, reentrant=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    spawn(_on_gpu, 2)


OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"reentrant": True},
    {"reentrant": True, "static_graph": True},
]


def _all_options(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name in ("call", "method", "twice", "two_forwards"):
        for options in OPTIONS:
            _train(rank, world_size, name, **options)
    for name in ("method", "two_forwards", "inner"):
        _train(rank, world_size, name, precision="fp16")
    _train(rank, world_size, "two_forwards", precision="fp16_naive")


def test_under_options_of_ddp() -> None:
    spawn(_all_options, 2)


def _unfreeze(rank: int, world_size: int, port: int) -> None:
    """A model that is frozen in parts, or as a whole, when it is boosted, and thaws later."""
    launch(rank, world_size, port)
    x = _data()[rank::world_size]
    for frozen in (["encoder"], ["encoder", "middle", "head"]):
        plain, raw = _net(), _net()
        for model in (plain, raw):
            for name in frozen:
                getattr(model, name).requires_grad_(False)
        booster, boosted, optimizer = _boost(raw)
        serial = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
        for step in range(4):
            if step == 1:
                plain.requires_grad_(True)
                boosted.requires_grad_(True)
            if step == 0 and "head" in frozen:
                continue
            plain(_data() + step).square().mean().backward()
            with booster.no_sync(boosted):
                booster.backward(boosted(x + step).square().mean() / 2, optimizer)
            booster.backward(boosted(x + step).square().mean() / 2, optimizer)
            for one in (serial, optimizer):
                one.step()
                one.zero_grad()
        _assert_alike(boosted, plain)


def test_parameters_that_thaw_after_boost() -> None:
    spawn(_unfreeze, 2)


def _outside(rank: int, world_size: int, port: int) -> None:
    """Parameters that only the optimizer knows: a temperature, and a head that comes later."""
    launch(rank, world_size, port)
    x = _data()[rank::world_size]
    plain, temperature, head = _net(), nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(5))
    serial = torch.optim.SGD([*plain.parameters(), temperature], lr=0.3, momentum=0.9)
    own_temperature, own_head = nn.Parameter(torch.tensor(0.5 + rank)), nn.Parameter(torch.ones(5) + rank)
    booster, model, optimizer = _boost(_net(), extra=(own_temperature,))
    for step in range(3):
        if step == 1:
            serial.add_param_group({"params": [head]})
            optimizer.add_param_group({"params": [own_head]})
        loss = (plain(_data()) * temperature).square().mean()
        own = (model(x) * own_temperature).square().mean()
        if step:
            loss = loss + (plain.encode(_data()) * head).mean()
            own = own + (model.encode(x) * own_head).mean()
        loss.backward()
        booster.backward(own, optimizer)
        for one in (serial, optimizer):
            one.step()
            one.zero_grad()
    _assert_alike(model, plain)
    extra, expected = nn.ParameterList([own_temperature, own_head]), nn.ParameterList([temperature, head])
    _assert_alike(extra, expected)
    optimizer.param_groups[0]["params"].append(late := nn.Parameter(torch.ones(3)))
    booster.backward(model(x).mean() + late.sum(), optimizer)
    with pytest.raises(
        RuntimeError, match=r"of shape \(3,\) that came into the groups after boost.*add_param_group"
    ):
        optimizer.step()


def test_parameters_outside_of_the_model() -> None:
    spawn(_outside, 2)


def _refusals(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    x = _data()[rank::world_size]
    booster, model, optimizer = _boost(_net())
    model.head.requires_grad_(False)  # DDP goes on waiting for it
    booster.backward(model(x).mean(), optimizer)
    with pytest.raises(
        RuntimeError,
        match=r"2 parameters have got none .*\(head.weight, head.bias\).*find_unused_parameters=True",
    ):
        optimizer.step()

    booster, model, optimizer = _boost(_net())
    old = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(1, 5))
    booster.backward(model(x).mean(), optimizer)
    with pytest.raises(RuntimeError, match=r"1 parameters have got none .*not in the model any more"):
        optimizer.step()
    del old

    raw = _net()
    raw.encoder.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    booster, model, optimizer = _boost(raw)
    with pytest.raises(
        RuntimeError, match=r"shape \(5,\) has used up its gradient .* before it was averaged"
    ):
        booster.backward(model.compute_loss(x), optimizer)


def test_gradients_that_cannot_be_averaged_are_refused() -> None:
    spawn(_refusals, 2)


class _Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def encode(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.norm(super().encode(x, skip))


def _branches(rank: int, world_size: int, port: int) -> None:
    """Ranks that use different parts: of the model, and of what DDP does not know."""
    launch(rank, world_size, port)
    plain, raw = _net(), _net()
    plain.middle.requires_grad_(False)
    raw.middle.requires_grad_(False)
    own, expected = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    booster, model, optimizer = _boost(raw, extra=(own,), find_unused_parameters=True)
    serial = torch.optim.SGD([*plain.parameters(), expected], lr=0.3, momentum=0.9)
    model.middle.requires_grad_(True)
    plain.middle.requires_grad_(True)
    x = _data()

    def part(net: Any, extra: Tensor, number: int, step: int) -> Tensor:
        """Of the ranks' losses, one leaves out what is not in the model, or the middle."""
        if step == 0:
            return net(x).square().mean() if number else net(x).mean() + extra.sum()
        return net(x + number, skip=number == 0).mean()

    for step in range(3):
        sum(part(plain, expected, number, step) / world_size for number in range(world_size)).backward()  # type: ignore[union-attr]
        booster.backward(part(model, own, rank, step), optimizer)
        optimizer.clip_grad_by_norm(100.0)
        for one in (serial, optimizer):
            one.step()
            one.zero_grad()
    _assert_alike(
        nn.ParameterList([*model.parameters(), own]), nn.ParameterList([*plain.parameters(), expected])
    )


def test_ranks_that_use_different_parts() -> None:
    spawn(_branches, 2)


def _ignored(rank: int, world_size: int, port: int) -> None:
    """Parameters that data parallelism leaves alone, such as experts: a rank has its own."""
    launch(rank, world_size, port)
    x = _data()[rank::world_size]
    for precision in (None, "bf16"):
        raw = _net()
        for p in raw.middle.parameters():
            p._ddp_to_ignore = True  # type: ignore[attr-defined]
        with torch.no_grad():
            raw.middle.weight.add_(rank)
        start = raw.middle.weight.detach().clone()
        booster, model, optimizer = _boost(raw, precision=precision)
        assert torch.equal(start, model.middle.weight), "its values stay as well"
        for loss in (model(x).float().mean(), model.compute_loss(x)):
            booster.backward(loss, optimizer)
        optimizer.step()
        moved, first = model.middle.weight.grad, model.middle.weight.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(moved, first) is (rank == 0)
        for part in (model.encoder, model.head):
            _assert_alike(part)


def test_parameters_that_are_left_alone() -> None:
    spawn(_ignored, 2)


def _others(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    x = _data()[rank::world_size]
    booster, model, optimizer = _boost(_Normed())
    loss = model.compute_loss(x)
    loss.backward(retain_graph=True)
    booster.backward(loss, optimizer)  # buffers have changed, but the graph holds
    optimizer.step()
    _assert_alike(model)  # buffers too

    twin = deepcopy(model)  # an average of weights, say: its calls are no calls of the model
    twin(x)
    optimizer.zero_grad()
    booster.backward(model.compute_loss(x), optimizer)
    optimizer.step()
    _assert_alike(model)

    optimizer.zero_grad()
    with booster.no_sync(model):
        booster.backward(model.compute_loss(x), optimizer)
    own = model.head.weight.grad.clone()
    booster.backward(model.encode(x).mean(), optimizer)  # the head is averaged too, though not in this pass
    assert not torch.equal(own, model.head.weight.grad)
    optimizer.step()
    _assert_alike(model)
    optimizer.zero_grad()

    inner = weakref.ref(model.unwrap())
    del model, optimizer, twin, loss
    gc.collect()
    booster._runs = None  # not the affair of this test
    gc.collect()
    assert inner() is None, "the hooks of parameters keep the model"


def test_buffers_copies_and_ends() -> None:
    spawn(_others, 2)
