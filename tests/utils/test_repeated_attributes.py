"""A second run finds the attributes, arguments and generators that the first one found: gradients, and what a
model is afterwards, are those of the plain model, bit for bit.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel import CheckpointPlanner
from colossalai.nn.checkpoint_blocks import checkpoint_blocks, group_blocks
from colossalai.utils.memory.live_bytes import LiveBytes

MODES = ["selective", "full", "offload", "region"]


class Block(nn.Module):
    """What those below have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        result: Tensor = x + self.two(torch.tanh(self.one(x)))
        return result


class Counting(Block):
    """Keeps numbers, a tensor and other things, which it reads and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean, self.last = 0, torch.zeros(8), torch.zeros(())
        self.written = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.written.mul_(0.9)
        if not hasattr(self, "late"):
            self.late = 2.0
        else:
            self.late = self.late * 0.5
        result: Tensor = super().forward(
            torch.tanh(x * self.calls + self.mean * self.late) * self.written.clone()
        )
        self.last = result.sum()
        return result


class Reading(Block):
    """Reads the statistics of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(torch.tanh(self.norm(x) - self.norm.running_mean))  # type: ignore[operator]
        return result


class Drawing(Block):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = nn.Module()
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch, self.older = torch.Generator().manual_seed(0), np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(8, generator=self.torch)
        scale = self.numpy.random() + self.python.random() + self.older.rand()
        result: Tensor = super().forward(torch.tanh(x * mask * scale))
        return result


class Writing(Block):
    """Gives its weights other values, by writes that torch does not count."""

    def forward(self, x: Tensor) -> Tensor:
        self.one.weight.data.mul_(0.9)
        result: Tensor = super().forward(x)
        return result


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def twins(kind: type[nn.Module], mode: str, net: Callable[[type[nn.Module]], nn.Module] = Net) -> Any:
    """A model, and the same with blocks that are computed again."""
    torch.manual_seed(0)
    plain = net(kind)
    model = checkpoint_blocks(copy.deepcopy(plain), "keep" if mode == "region" else mode)  # type: ignore[arg-type]
    if mode == "region":
        group_blocks(model, [["layers.0", "layers.1", "layers.2"]])
    return plain, model


def results(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.state_dict().values()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Counting, Reading, Drawing, Writing])
def test_gradients_and_state_are_those_of_the_plain_model(kind: type[nn.Module], mode: str) -> None:
    plain, model = twins(kind, mode)
    for got, want in zip(results(model), results(plain), strict=True):
        assert torch.equal(got, want)
    if kind is Counting:
        for got, want in zip(model.layers, plain.layers, strict=True):
            assert (got.calls, got.late) == (want.calls, want.late)
            assert torch.equal(got.mean, want.mean)
            assert torch.equal(got.written, want.written)


@pytest.mark.parametrize("mode", MODES)
def test_conditions_of_each_pass(mode: str) -> None:
    """What a script sets before each of two forward passes holds in the second runs of both; so does
    ``eval()`` between the passes.
    """

    class Conditioned(Block):
        condition = 0.0

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(nn.functional.dropout(x * self.condition, 0.5, self.training))
            return result

    found = []
    for each in twins(Conditioned, mode):
        torch.manual_seed(1)
        x, passes = torch.randn(4, 8), []
        for condition in (1.0, 3.0):
            for layer in each.layers:
                layer.condition = condition
            passes.append(each(x))
        each.eval()
        (passes[0] - passes[1]).square().mean().backward()
        assert not any(part.training for part in each.modules())
        assert all(layer.condition == 3.0 for layer in each.layers)
        found.append([p.grad for p in each.parameters()])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_are_given_for_a_call(mode: str) -> None:
    """``functional_call``, as for a step of meta-learning: the second run computes with the given ones."""
    found = []
    for each in twins(Block, mode):
        torch.manual_seed(1)
        x = torch.randn(4, 8)
        inner = each(x).square().mean()
        names, own = zip(*each.named_parameters(), strict=True)
        steps = torch.autograd.grad(inner, own)
        given = {
            n: (p - 0.5 * s).detach().requires_grad_() for n, p, s in zip(names, own, steps, strict=True)
        }
        torch.func.functional_call(each, given, (x,)).square().mean().backward()
        assert all(p.grad is None for p in own)
        found.append([p.grad for p in given.values()])
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))


@dataclass
class State:
    hidden: Tensor
    steps: int = 0


class OfList(Block):
    def forward(self, x: list[Tensor]) -> Tensor:
        result: Tensor = super().forward(x[0])
        return result


class NetOfList(Net):
    def forward(self, x: Tensor) -> Tensor:
        box = [x]
        for layer in self.layers:
            box[0] = layer(box)
        return box[0]


class OfState(Block):
    def forward(self, x: State) -> Tensor:
        x.steps += 1
        result: Tensor = super().forward(x.hidden * x.steps)
        return result


class NetOfState(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer in self.layers:
            state.hidden = layer(x=state)
        return state.hidden


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "net"), [(OfList, NetOfList), (OfState, NetOfState)])
def test_structures_that_change(kind: type[nn.Module], net: Any, mode: str) -> None:
    """A list or an object that blocks take, and that is changed afterwards."""
    plain, model = twins(kind, mode, net)
    for got, want in zip(results(model), results(plain), strict=True):
        assert torch.equal(got, want)


def test_results_that_lie_in_attributes_take_no_memory_twice() -> None:
    """The ones of the step before are let go as soon as others take their place."""

    class Keeping(Block):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x)
            self.seen = x.detach() * 2
            return result

    _, model = twins(Keeping, "full")
    now = []
    with LiveBytes() as memory:
        memory.hold(model.parameters())
        for _ in range(4):
            loss = model(torch.randn(64, 8)).sum()
            now.append(memory.now)
            loss.backward()
            del loss
            model.zero_grad()
    assert now[0] == now[1] == now[2] == now[3]


def test_a_plan_leaves_generators_where_they_are() -> None:
    """The numbers that training draws are those of a model without a plan."""
    plain, model = twins(Drawing, "keep")
    planner = CheckpointPlanner(model, torch.randn(4, 8), device="cpu")
    planner.apply(planner.plan(planner.least[2]))
    for got, want in zip(results(model), results(plain), strict=True):
        assert torch.equal(got, want)
