"""Code with a backward pass of its own has it in a graph, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction

from colossalai.fx import symbolic_trace, trace_model


class Straight(torch.autograd.Function):
    """Rounds, which has no gradient, and passes five times the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x.exp())
        return torch.round(x, decimals=digits), x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return 5 * gradient, None


straight = Straight.apply


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rounded, sign = straight(x, 1)
        result: Tensor = rounded * sign
        return result


class Scaled(nn.Module):
    """Puts a hook on a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda gradient: 3 * gradient)
        return x


def model_with(part: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 1))


def seven_times(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
    return (7 * inputs[0],)


def hooked() -> nn.Module:
    part = nn.Tanh()
    part.register_full_backward_hook(seven_times)
    return part


_PARTS: dict[str, Callable[[], nn.Module]] = {"function": Rounded, "tensor": Scaled, "module": hooked}


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    run(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", _PARTS)
def test_gradients_are_those_of_the_model(kind: str) -> None:
    model, x = model_with(_PARTS[kind]()), torch.randn(4, 8)
    want = gradients(model, model, x)
    graph = trace_model(model, x)
    front = symbolic_trace(model, meta_args={"input": x})
    for run in (graph, front):
        for mine, theirs in zip(gradients(model, run, x), want, strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
    if kind == "function":
        assert not graph.leaves
        assert "Straight has a backward pass of its own" in graph.failures["export"]
        (node,) = (node for node in graph if node.operation == "Straight")
        assert node.module == "1"
        assert node.saved_bytes == 4 * 8 * 4  # what it keeps itself, and not what its operations would
        assert node.backward.written
    else:
        assert [leaf.path for leaf in graph.leaves] == ["1"]
    # torch is as it was
    assert "apply" not in vars(_SingleLevelFunction)
    assert Tensor.register_hook.__module__ == "torch._tensor"


def test_the_line_of_a_hook_is_named() -> None:
    graph = trace_model(model_with(Scaled()), torch.randn(4, 8))
    assert "x.register_hook(lambda gradient: 3 * gradient)" in graph.failures["make_fx"]
