"""What users do beside `model(x)` under TorchFSDPPlugin, and parameters without dims: equal to the serial
model, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, register_fsdp_forward_method

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.testing import spawn
from colossalai.testing.boosted import whole_tensor
from tests.booster.plans import launch

Backward = Callable[[Tensor], None]


class Scale(nn.Module):
    """A parameter without dims, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    """Blocks, a head, and CLIP's `logit_scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), Scale(), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)) * self.logit_scale.exp()

    def compute_loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def unwrap(self) -> Net:
        return self


def _method(model: Net, x: Tensor, backward: Backward) -> None:
    backward(model.compute_loss(x))


def _twice(model: Net, x: Tensor, backward: Backward) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    backward(loss)


def _two_forwards(model: Net, x: Tensor, backward: Backward) -> None:
    first, second = model(x).square().mean(), model.unwrap()(x + 1).square().mean()
    backward(first)
    backward(second)


def _inner(model: Net, x: Tensor, backward: Backward) -> None:
    with torch.no_grad():
        model.unwrap()(x)  # leaves weights gathered
    model(x)
    backward(model.unwrap()(x).square().mean())


def _data(model: Net, x: Tensor, backward: Backward) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9
    backward(model(x).square().mean())


def _load(model: Net, x: Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())
    model.load_state_dict({name: value + 0.1 for name, value in _net().state_dict().items()})


def _thaw(model: Net, x: Tensor, backward: Backward) -> None:
    frozen = not model.head.weight.requires_grad
    model.head.requires_grad_(frozen)
    model.logit_scale.requires_grad_(frozen)
    backward(model(x).square().mean())


def _clip_value(model: Net, x: Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _clip_norm(model: Net, x: Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


HABITS = (_clip_norm, _method, _twice, _two_forwards, _inner, _data, _load, _thaw, _clip_value)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _x() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def _serial(step: Callable[[Net, Tensor, Any], None], steps: int = 3, model: Net | None = None) -> Net:
    model = model or _net()
    optimizer = _adam(model)
    for i in range(steps):
        step(model, _x() + i, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()
    return model


def _assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        found = whole_tensor(p.detach()) if hasattr(p, "full_tensor") else p.detach()
        torch.testing.assert_close(
            found.cpu(), q.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def _habits(rank: int, world_size: int, port: int, device: str = "cpu", **options: Any) -> None:
    if device == "cpu":
        launch(rank, world_size, port)
    else:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=address)
    for habit in HABITS:
        raw = _net()
        booster = Booster(device, plugin=TorchFSDPPlugin(**options))
        model, optimizer, *_ = booster.boost(raw, _adam(raw))
        assert isinstance(optimizer, torch.optim.Optimizer)

        def backward(loss: Tensor, booster: Any = booster, optimizer: Any = optimizer) -> None:
            booster.backward(loss, optimizer)

        for i in range(3):
            habit(model, (_x() + i)[rank::world_size].to(device), backward)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(model, _serial(habit))


def test_equal_to_the_serial_model() -> None:
    spawn(_habits, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu(offload: bool) -> None:
    spawn(_habits, 2, device="cuda", cpu_offload=offload)


def _scalars(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Parameters without dims: accumulation, clipping, evaluation, precisions, copies of the model,
    checkpoints.
    """
    launch(rank, world_size, port)
    x = _x()[rank::world_size]

    def clipped(model: Net, x: Tensor, backward: Backward) -> None:
        backward(model(x).square().mean())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    norms: list[Tensor] = []
    expected = _serial(clipped)
    meshes = [None] if world_size == 2 else [init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))]
    for mesh in meshes:
        raw = _net()
        booster = Booster("cpu", plugin=TorchFSDPPlugin(mesh))
        model, optimizer, *_ = booster.boost(raw, _adam(raw))
        for i in range(3):
            with booster.no_sync(model):
                booster.backward(model(x + i).square().mean() / 2, optimizer)
            booster.backward(model(x + i).square().mean() / 2, optimizer)
            torch.testing.assert_close(optimizer.clip_grad_by_norm(0.1), norms[i])
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(model, expected)
    booster.save(folder / "run")
    other = _net()
    again = Booster("cpu", plugin=TorchDDPPlugin())
    ddp, ddp_optimizer, *_ = again.boost(other, _adam(other))
    again.load(folder / "run")
    _assert_equal(ddp, expected)
    again.save(folder / "back")
    booster.load(folder / "back")
    _assert_equal(model, expected)
    for boost, replica, optim in ((booster, model, optimizer), (again, ddp, ddp_optimizer)):
        boost.backward(replica(x).square().mean(), optim)
        optim.step()
    half, raw = Booster("cpu", mixed_precision="fp16", plugin=TorchFSDPPlugin()), _net()
    model16, optimizer16, *_ = half.boost(raw, _adam(raw))
    half.backward(model16(x).float().square().mean() * 1e-3, optimizer16)
    assert optimizer16.clip_grad_by_norm(0.1).isfinite()  # cut gradients and whole ones are unscaled
    one = _net()
    one.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()})
    _assert_equal(model, one)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_without_dims(world_size: int, tmp_path: Path) -> None:
    spawn(_scalars, world_size, folder=tmp_path)


def _hooks(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    booster = Booster("cpu", plugin=TorchFSDPPlugin())

    raw = _net()
    raw.head.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(
        ValueError, match=r"'head.weight' has a hook of register_hook.*post_accumulate_grad_hook"
    ):
        booster.boost(raw, _adam(raw))

    def mask(model: Net) -> Any:
        def zero(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(0)

        return model.head.weight.register_post_accumulate_grad_hook(zero)

    raw, plain = _net(), _net()
    mask(plain)
    handle = mask(raw)
    model, optimizer, *_ = booster.boost(raw, _adam(raw))
    booster.backward(model(_x()[rank::world_size]).square().mean(), optimizer)
    optimizer.step()
    _assert_equal(model, _serial(lambda m, x, b: b(m(x).square().mean()), 1, plain))
    handle.remove()
    optimizer.zero_grad()
    booster.backward(model(_x()).square().mean(), optimizer)
    assert whole_tensor(model.head.weight.grad).abs().sum() > 0, "the handle removes the hook after boost too"
    with pytest.raises(
        RuntimeError, match=r"register_hook on a parameter of shape \(3, 5\) .* never be called"
    ):
        model.head.weight.register_hook(print)
    kept = copy.deepcopy(list(model.parameters()))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(whole_tensor(p.detach()).abs().sum() > 0 for p in kept if hasattr(p, "full_tensor"))


def test_hooks_are_called_or_refused() -> None:
    spawn(_hooks, 2)


def _refusals(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    raw = _net()
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    model: Any
    model, optimizer, *_ = booster.boost(raw, _adam(raw))
    x = _x()
    with pytest.raises(
        RuntimeError, match=r"model.encode\(...\) computes with weights that are cut.*'encode'\)"
    ):
        model.encode(x)
    register_fsdp_forward_method(model.unwrap(), "encode")
    expected = _serial(lambda m, x, b: b(m.encode(x).mean()), 1)
    booster.backward(model.encode(x[rank::world_size]).mean(), optimizer)
    optimizer.step()
    _assert_equal(model, expected)
    with pytest.raises(RuntimeError, match=r"needs values of the same shape and dtype, got \(2,\)"):
        model.encoder.bias.data = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(4,\) that was not in the model at boost"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(optimizer.param_groups) == 1
    model.unwrap().head.weight = nn.Parameter(torch.ones(3, 5))
    with pytest.raises(
        RuntimeError, match=r"the parameter 'head.weight' was replaced by another after boost"
    ):
        model(x)
    with pytest.raises(
        RuntimeError, match=r"the parameter 'head.weight' was replaced by another after boost"
    ):
        optimizer.step()


def test_what_would_be_lost_is_refused() -> None:
    spawn(_refusals, 2)


class Ways(nn.Module):
    """Layers of one size in units of their own, two heads in the unit of the model, and ways through them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.small, self.large = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor, blocks: Sequence[int] = (0, 1, 2), head: str = "small") -> Tensor:
        for i in blocks:
            x = self.blocks[i](x).tanh()
        return getattr(self, head)(x).square().mean()


WAYS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "another layer of the same size": (
        [{"blocks": (0, 1)}, {"blocks": (0, 2)}],
        r"rank 0 runs 'blocks.1' forward; rank 1 runs 'blocks.2' forward",
    ),
    "one layer less": (
        [{}, {"blocks": (0, 1)}],
        r"rank 0 runs 'blocks.2' forward; rank 1 has done its forward pass",
    ),
    "another head": (
        [{}, {"head": "large"}],
        r"rank 0 reduces gradients of the model, with small.weight, small.bias;"
        r" rank 1 .* large.weight, large.bias",
    ),
}


def check_ways(rank: int, world_size: int, port: int, way: str, late: bool) -> None:
    launch(rank, world_size, port)
    booster = Booster(plugin=TorchFSDPPlugin())
    torch.manual_seed(0)
    model = Ways()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if late:  # as with NCCL
        model._lockstep._at_once = False
    x = torch.ones(2, 4)

    def train(**way: Any) -> None:
        booster.backward(model(x, **way), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    train()  # all ranks take the same way
    kwargs, words = WAYS[way]
    with pytest.raises(RuntimeError, match=f"take different ways: {words}.*LowLevelZeroPlugin"):
        train(**kwargs[rank])


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_take_different_ways_are_refused(way: str) -> None:
    spawn(check_ways, 2, way=way, late=False)


def test_ranks_that_take_different_ways_are_refused_before_the_step() -> None:
    """Where messages of one size were taken for each other already, since only the end of a pass is
    compared.
    """
    spawn(check_ways, 2, way="another layer of the same size", late=True)


class Writes(nn.Module):
    """Halves a weight in its forward: one of the model itself, or one of a block that has computed
    already.
    """

    def __init__(self, where: str, data: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.where, self.data = where, data

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "model":
            self.halve(self.first)
        x = self.blocks[0](self.first(x))
        if self.where == "block":
            self.halve(self.blocks[0])
        return self.last(x)

    @torch.no_grad()
    def halve(self, layer: Any) -> None:
        if self.data:
            layer.bias.data.mul_(0.5)  # which torch does not count
        else:
            layer.bias.mul_(0.5)


def _train_writes(
    where: str, rank: int, world_size: int, booster: Booster | None, steps: int = 1
) -> nn.Module:
    raw = Writes(where)
    model, optimizer = (raw, _adam(raw)) if booster is None else booster.boost(raw, _adam(raw))[:2]
    for i in range(steps):
        loss = model((_x() + i)[rank::world_size]).square().mean()
        if where == "script":
            raw.halve(raw.last)
        loss.backward() if booster is None else booster.backward(loss, optimizer)  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
    return model


def _writes(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    words = (
        r"the forward of FSDP{}, or the script after it, has changed one of its weights in place"
        r".* TorchDDPPlugin"
    )
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        booster = Booster("cpu", plugin=TorchFSDPPlugin(sharding_strategy=strategy))
        with pytest.raises(RuntimeError, match=words.format("Writes")):
            booster.boost(Writes("model")).model(_x())
        with pytest.raises(RuntimeError, match=words.format("Writes")):
            booster.boost(Writes("model", data=True)).model(_x())
        with pytest.raises(RuntimeError, match=words.format("Writes")):
            _train_writes("script", rank, world_size, booster)
        if strategy is ShardingStrategy.FULL_SHARD:  # only this rank's part of the block is there
            found = _train_writes("block", rank, world_size, booster, steps=2)
            _assert_equal(found, _train_writes("block", 0, 1, None, steps=2))
            continue
        with pytest.raises(RuntimeError, match=words.format("Linear")):
            _train_writes("block", rank, world_size, booster)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_written_to_while_they_are_gathered_are_refused(world_size: int) -> None:
    spawn(_writes, world_size)


def _inference_first(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    raw, booster = _net(), Booster("cpu", plugin=TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(raw, _adam(raw))
    with torch.inference_mode():
        torch.testing.assert_close(model(_x()), _net()(_x()))
    for i in range(2):
        booster.backward(model((_x() + i)[rank::world_size]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    _assert_equal(model, _serial(lambda m, x, backward: backward(m(x).square().mean()), 2))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_trained_after_an_evaluation_in_inference_mode(world_size: int) -> None:
    spawn(_inference_first, world_size)
