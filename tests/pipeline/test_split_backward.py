"""The two halves of a backward pass make one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from colossalai.pipeline.split_backward import split_backward
from colossalai.utils import checkpoint


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Side(nn.Module):
    """An output that does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.constant = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.constant * 2


class Double(torch.autograd.Function):
    """A function in Python with a weight: a tensor-parallel layer has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).flatten(0, -2).sum(0)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(torch.tanh(Double.apply(x, self.first)), self.second)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Torch's reentrant checkpoints refuse a backward pass for some of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.layers, False, x)  # type: ignore[no-any-return]


MODELS = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), True),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), True),
    "functions in Python": (Doubled, True),
    "tied": (Tied, False),
    "side": (Side, False),
    "checkpointed": (Checkpointed, False),
    "without weights": (nn.Tanh, False),
}


# also where GPUs are: there torch may be 2.11, in which such functions die sooner
GPU_TOO = pytest.param("functions in Python", marks=pytest.mark.gpu, id="functions in Python, with a GPU")


@pytest.mark.parametrize("name", [*MODELS, GPU_TOO])
def test_equals_one_pass(name: str) -> None:
    build, later = MODELS[name]
    torch.manual_seed(0)
    model = build()
    x = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(2):  # gradients add up
        output = model(x)
        outputs = list(output) if isinstance(output, tuple) else [output]
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):
        output = model(inner := x.detach().requires_grad_() * 1)
        outputs = list(output) if isinstance(output, tuple) else [output]
        before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found, rest = split_backward(
            outputs, [torch.ones_like(o) for o in outputs], [get_gradient_edge(inner)]
        )
        torch.testing.assert_close(found[0] * 2, x.grad)
        if later:  # not one weight has its gradient before the second half
            for n, p in model.named_parameters():
                assert (before[n] is None and p.grad is None) or torch.equal(before[n], p.grad)
        del output, outputs  # a schedule has sent them and forgets them
        rest()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n])


def test_products_are_not_done_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = model(inner := x * 1)
    counts = []
    edges = [get_gradient_edge(inner)]
    with FlopCounterMode(display=False) as counter:
        _, rest = split_backward([output], [torch.ones_like(output)], edges)
    counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        rest()
    counts.append(counter.get_total_flops())
    assert counts == [forward.get_total_flops()] * 2


def test_a_first_stage_does_everything_later() -> None:
    model = nn.Linear(4, 1)
    found, rest = split_backward([model(torch.ones(1, 4)).sum()], [None], [])
    assert found == []
    assert model.weight.grad is None
    rest()
    assert torch.equal(model.weight.grad, torch.ones(1, 4))


def test_nothing_to_do() -> None:
    found, rest = split_backward([], [], [get_gradient_edge(torch.ones(1, requires_grad=True) * 1)])
    rest()
    assert found == [None]
