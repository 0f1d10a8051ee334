from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.mesh import RandomStream
from colossalai.utils import activation_checkpoint as module
from colossalai.utils import checkpoint, get_current_device, register_random_state
from colossalai.utils.memory.live_bytes import LiveBytes

BOTH = pytest.mark.parametrize("use_reentrant", [True, False])
OFFLOAD = pytest.mark.parametrize("offload", [False, True])


def _block(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 6), nn.Dropout(dropout)
    ).to(get_current_device())


def _train(
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor], inputs_need_grad: bool = True
) -> list[torch.Tensor]:
    """Output, gradients, and random numbers drawn between forward and backward and after, for one step."""
    block = _block()
    x = torch.linspace(-1, 1, 30, device=get_current_device()).view(5, 6).requires_grad_(inputs_need_grad)
    torch.manual_seed(2)
    y = run(block, x)
    between = torch.rand(3, device=x.device)
    y.square().sum().backward()
    after = torch.rand(3, device=x.device)
    gradients = [p.grad for p in block.parameters()] + ([x.grad] if inputs_need_grad else [])
    return [y.detach(), between, after, *gradients]  # type: ignore[list-item]


def _assert_same(
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    plain: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x),
    **kwargs: Any,
) -> None:
    for got, expected in zip(_train(run, **kwargs), _train(plain, **kwargs), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@BOTH
@OFFLOAD
def test_gradients_equal_those_without_checkpointing(use_reentrant: bool, offload: bool) -> None:
    _assert_same(lambda block, x: checkpoint(block, offload, x, use_reentrant=use_reentrant))


@BOTH
@OFFLOAD
def test_nested(use_reentrant: bool, offload: bool) -> None:
    def outer(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def twice(x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.dropout(x)
            return block(checkpoint(block, offload, x, use_reentrant=use_reentrant))

        return checkpoint(twice, offload, x, use_reentrant=use_reentrant)

    def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(block(torch.nn.functional.dropout(x)))

    _assert_same(outer, plain)


@BOTH
def test_several_blocks_are_recomputed_in_reverse_order(use_reentrant: bool) -> None:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(block, True, x, use_reentrant=use_reentrant)
        return x

    _assert_same(run, lambda block, x: block(block(block(x))))


@BOTH
def test_inputs_without_gradient_do_not_lose_those_of_the_parameters(use_reentrant: bool) -> None:
    _assert_same(
        lambda block, x: checkpoint(block, False, x, use_reentrant=use_reentrant), inputs_need_grad=False
    )


@BOTH
def test_tensors_inside_a_structure_get_their_gradients(use_reentrant: bool) -> None:
    def mixed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def function(a: torch.Tensor, rest: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
            return block(a * scale) * rest["b"]

        both = x.exp()  # its graph is needed by the argument and by the tensor in the dict
        return checkpoint(function, False, both, {"b": both.sin()}, 2.0, use_reentrant=use_reentrant)

    def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        both = x.exp()
        return block(both * 2.0) * both.sin()

    _assert_same(mixed, plain)


@BOTH
def test_several_outputs_and_arguments_that_are_not_tensors(use_reentrant: bool) -> None:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def function(x: torch.Tensor, nothing: None, n: int) -> tuple[torch.Tensor, int]:
            return block(x), n

        y, n = checkpoint(function, True, x, None, 3, use_reentrant=use_reentrant)
        assert n == 3
        return y

    _assert_same(run)


@BOTH
def test_the_function_runs_again_in_the_backward_pass_only(use_reentrant: bool) -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(function, False, x, use_reentrant=use_reentrant)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2

    with torch.no_grad():
        checkpoint(function, False, x, use_reentrant=use_reentrant)
    assert len(calls) == 3


@BOTH
def test_a_retained_graph_is_recomputed_alike_each_time(use_reentrant: bool) -> None:
    block = _block()
    x = torch.ones(2, 6, device=get_current_device(), requires_grad=True)
    y = checkpoint(block, False, x, use_reentrant=use_reentrant).sum()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    torch.rand(1)
    y.backward()
    assert first is not None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, first, rtol=0, atol=0)


def test_autocast_is_repeated() -> None:
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return checkpoint(block, False, x)

    def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return block(x)

    _assert_same(run, plain)


@pytest.fixture
def own_stream() -> Iterator[random.Random]:
    known = list(module._random_states)
    stream = random.Random(0)
    register_random_state(stream.getstate, stream.setstate)
    yield stream
    module._random_states[:] = known


@BOTH
def test_a_registered_stream_is_repeated(own_stream: random.Random, use_reentrant: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * own_stream.random()).sin()

    x = torch.ones(3, requires_grad=True)
    factor = random.Random(0).random()
    y = checkpoint(function, False, x, use_reentrant=use_reentrant)
    expected = own_stream.getstate()
    y.sum().backward()
    assert own_stream.getstate() == expected
    assert x.grad is not None
    torch.testing.assert_close(x.grad, factor * (torch.ones(3) * factor).cos())


@BOTH
def test_random_states_return_after_a_failed_second_run(
    own_stream: random.Random, use_reentrant: bool
) -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(own_stream.random())
        if len(calls) == 2:
            raise RuntimeError("second run")
        return x.sin()

    y = checkpoint(function, False, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    expected = own_stream.getstate()
    with pytest.raises(RuntimeError, match="second run"):
        y.sum().backward()
    assert own_stream.getstate() == expected
    assert calls[0] == calls[1]


def test_a_stream_registered_between_the_runs_is_left_alone() -> None:
    known = list(module._random_states)
    y = checkpoint(torch.sin, False, torch.ones(3, requires_grad=True))
    stream = random.Random(0)
    try:
        register_random_state(stream.getstate, stream.setstate)
        y.sum().backward()
    finally:
        module._random_states[:] = known
    assert stream.getstate() == random.Random(0).getstate()


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(TypeError, match=r"activation_offload is True or False, got Tensor"):
        checkpoint(torch.sin, torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="checkpoint runs a function or module, got Tensor"):
        checkpoint(torch.ones(3), False)  # type: ignore[arg-type]


@pytest.mark.gpu
@BOTH
def test_offload_frees_device_memory(use_reentrant: bool) -> None:
    held = {}
    gc.collect()  # else what other tests have left behind may be freed between the two measurements
    for offload in (False, True):
        x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = x
        for _ in range(4):
            y = checkpoint(lambda t: t.sin().mul(1.5), offload, y, use_reentrant=use_reentrant)
        held[offload] = torch.cuda.memory_allocated() - before
        expected = torch.autograd.grad(_plain(x), x)[0]
        y.sum().backward()
        torch.testing.assert_close(x.grad, expected)
        del x, y, expected
    assert held == {False: 4 * 4 * 1024**2, True: 4 * 1024**2}  # with offload only the last output stays


def _plain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = x.sin().mul(1.5)
    return x.sum()


@pytest.mark.gpu
def test_a_strided_input_comes_back_with_its_strides() -> None:
    x = torch.randn(64, 32, device="cuda").t()
    packed = module._to_host(x)
    assert packed[1].is_pinned()
    back = module._to_device(packed)
    assert back.stride() == x.stride()
    assert torch.equal(back, x)


@BOTH
def test_plan_independent_dropout_is_repeated(use_reentrant: bool) -> None:
    stream = RandomStream(0, "dropout")
    layer = nn.Linear(64, 64)

    def block(x: torch.Tensor) -> torch.Tensor:
        return stream.dropout(layer(x), 0.5)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, int]:
        stream.step = 0
        x = torch.ones(8, 64, requires_grad=True)
        run(run(x)).square().sum().backward()
        assert x.grad is not None
        return x.grad, stream.step

    plain, steps = gradients(block)
    checkpointed, steps_again = gradients(lambda x: checkpoint(block, False, x, use_reentrant=use_reentrant))
    assert torch.equal(plain, checkpointed)
    assert steps == steps_again == 2


class _Count(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [True, False])
def test_products_that_are_kept_do_not_run_again(keep: bool) -> None:
    _assert_same(lambda block, x: checkpoint(block, False, x, keep_products=keep, use_reentrant=False))
    block = _block()
    x = torch.ones(5, 6, device=get_current_device(), requires_grad=True)
    y = checkpoint(block, False, x, keep_products=keep, use_reentrant=False)
    with _Count() as backward:
        y.sum().backward()
    assert backward.calls.get("addmm", 0) == (0 if keep else 2)
    assert backward.calls["gelu"] == 1


def test_kept_products_stay_on_the_device() -> None:
    with pytest.raises(ValueError, match=r"keep_products=True no activation_offload"):
        checkpoint(_block(), True, torch.ones(5, 6), keep_products=True)


def test_it_compiles_in_one_piece() -> None:
    block = _block(0.0)
    x = torch.linspace(-1, 1, 30).view(5, 6).to(get_current_device())
    for keep in (False, True):
        run = torch.compile(
            lambda x, keep=keep: checkpoint(block, False, x, keep_products=keep, use_reentrant=False),
            backend="aot_eager",
            fullgraph=True,
        )
        gradients = []
        for each in (run, block):
            block.zero_grad()
            each(x.requires_grad_()).square().sum().backward()
            gradients.append([p.grad for p in block.parameters()])
        torch.testing.assert_close(*gradients)


class _Writes(nn.Module):
    """Begins with an operation in place on its input, and goes on with dropout."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.write, self.block = write, _block()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.write(x)
        mask += 1
        return self.block(x) * mask


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": torch.relu_,
    "not idempotent": lambda x: x.mul_(3).add_(1),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, inplace=True),
    "element": lambda x: x.__setitem__(0, 2.0),
    "view": lambda x: x.view(-1)[3:].neg_(),
}


@OFFLOAD
@pytest.mark.parametrize("write", WRITES)
def test_a_function_may_write_into_its_inputs(write: str, offload: bool) -> None:
    found = []
    for checkpointed in (False, True):
        module = _Writes(WRITES[write]).to(get_current_device())
        x = torch.linspace(-1, 1, 30, device=get_current_device()).view(5, 6).requires_grad_()
        mask = torch.ones(6, device=x.device)
        torch.manual_seed(2)
        for _ in range(2):  # in the second pass the module is known
            h = x * 2
            y = checkpoint(module, offload, h, mask, use_reentrant=False) if checkpointed else module(h, mask)
            y.square().sum().backward(retain_graph=True)
            torch.rand(1)
            y.sum().backward()  # a third run begins with the same inputs
        found.append([y, h, mask, torch.rand(3), x.grad, *(p.grad for p in module.parameters())])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_module_that_leaves_its_inputs_alone_costs_no_copies() -> None:
    block = _block()
    x = torch.ones(5, 6, device=get_current_device(), requires_grad=True)
    copies = []
    for step in range(3):
        h = x * 2
        with _Count() as forward:
            y = checkpoint(block.forward, False, h, use_reentrant=False)
        copies.append(forward.calls.get("clone", 0))
        with _Count() as backward:
            y.sum().backward()
        assert "clone" not in backward.calls, step
    assert copies == [1, 0, 0]


def test_copies_of_offloaded_inputs_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in host memory is no longer held by the graph of the device."""
    offloaded: list[Any] = []

    def to_host(tensor: torch.Tensor) -> Any:
        if tensor.numel():  # torch 2.11 saves an empty tensor of its own beside the inputs
            offloaded.append(weakref.ref(tensor))
        return tensor.device, tensor.detach().clone()

    monkeypatch.setattr(module, "_to_host", to_host)
    x = torch.randn(4, 4, requires_grad=True)
    y = x * 1.0
    for _ in range(3):
        y = checkpoint(lambda t: t.sin().mul_(1.5), True, y, use_reentrant=False)
    gc.collect()
    assert offloaded
    assert not [ref for ref in offloaded if ref() is not None]
    expected = torch.autograd.grad((x.sin() * 1.5).sin().mul(1.5).sin().mul(1.5).sum(), x)[0]
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_module_that_writes_later_is_refused() -> None:
    module = _Writes(lambda x: None)
    x = torch.ones(5, 6, requires_grad=True, device=module.block[0].weight.device)
    checkpoint(module.block, False, x * 2, use_reentrant=False).sum().backward()
    module.block[0].register_forward_pre_hook(lambda layer, args: (args[0].mul_(2),))
    y = checkpoint(module.block, False, x * 2, use_reentrant=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_kept_product_that_is_changed_in_place_is_refused() -> None:
    x = torch.randn(3, 3, requires_grad=True)

    def doubled(x: torch.Tensor, again: bool) -> torch.Tensor:
        with module.computed_again() if again else contextlib.nullcontext():
            return (x @ x).mul_(2).sin()

    with pytest.raises(RuntimeError, match=r"the result of aten\.mm.* was changed in place"):
        checkpoint(doubled, False, x, False, keep_products=True, use_reentrant=False).sum().backward()
    expected = torch.autograd.grad((2 * x @ x).sin().sum(), x)[0]
    checkpoint(doubled, False, x, True, keep_products=True, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_kept_product_that_is_changed_without_a_version_is_refused() -> None:
    """torch's GRU does so on a CPU, by ``unsafe_chunk``."""
    layer, x = nn.GRU(8, 8), torch.randn(3, 2, 8)
    with pytest.raises(RuntimeError, match=r"the result of aten.* was changed in place .*mode 'full'"):
        checkpoint(layer, False, x, keep_products=True, use_reentrant=False)[0].sum().backward()


class Residual(nn.Module):
    """Two products, of which the backward pass does not need the result of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.drop = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(nn.functional.gelu(self.one(x)))
        return x + nn.functional.dropout(y, self.drop, self.drop > 0)


def test_products_that_the_second_run_does_not_need_are_not_kept() -> None:
    torch.manual_seed(0)
    block, x = Residual(), torch.randn(128, 64, requires_grad=True)

    def kept() -> int:
        with LiveBytes() as memory:
            memory.hold(block.parameters())
            held = memory.now
            output = checkpoint(block, False, x, use_reentrant=False, keep_products=True)
            found = memory.now - output.nbytes - held
            block.zero_grad()
            output.sum().backward()
        again = [p.grad for p in block.parameters()]
        block.zero_grad()
        block(x).sum().backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(again, block.parameters(), strict=True))
        return found

    first, then = kept(), kept()
    assert first - then == x.nbytes
    block.drop = 1e-9  # now the second run needs it: it is computed again once, and kept from then on
    with_masks = kept()
    assert kept() - with_masks == x.nbytes
