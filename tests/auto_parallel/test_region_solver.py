"""The solver of regions finds what trying all of them finds, and plans with regions beat Chen's segments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from colossalai.auto_parallel.checkpoint import CheckpointPlanner, CheckpointSolverChen
from colossalai.auto_parallel.checkpoint.mode_solver import ModeCost, ModeProblem, ModeStage
from colossalai.auto_parallel.checkpoint.region_solver import InnerCost, RegionSolver
from tests.auto_parallel.models import gpt2
from titans.model.resnet import resnet50

Inner = list[Any]
"""What is in a region: "keep" for a block that keeps everything, or a list, a region of its own."""


def problem_of(stages: int, seed: int) -> tuple[ModeProblem, list[InnerCost]]:
    numbers = random.Random(seed)
    found, inner = [], []
    for place in range(stages):
        size, more = numbers.randint(1, 4), numbers.randint(2, 9)
        seconds = numbers.randint(2, 9)
        costs = {
            "keep": ModeCost(size + more, size + more + 2, size + more + 3, 2.0 * seconds),
            "full": ModeCost(size, size + 3, size + more + 3, 3.0 * seconds),
        }
        found.append(ModeStage(f"block {place}", costs, numbers.randint(0, 2)))
        inner.append(
            InnerCost(
                size,
                size + more,
                numbers.randint(0, 2),
                more + 2,
                3,
                numbers.randint(1, 3),
                numbers.choice([1.0, 1.25, 1.5]),
            )
        )
    return ModeProblem(found), inner


def insides(blocks: int) -> Iterator[Inner]:
    """All ways to compute so many blocks of a region again."""
    if not blocks:
        yield []
        return
    for rest in insides(blocks - 1):
        yield ["keep", *rest]
    for length in range(1, blocks):  # what comes behind makes a region inside worth it
        for inner in insides(length):
            for rest in insides(blocks - length):
                yield [inner, *rest]


def plans(blocks: int) -> Iterator[Inner]:
    """All ways to compute so many blocks: modes, and regions of several."""
    if not blocks:
        yield []
        return
    for mode in ("keep", "full"):
        for rest in plans(blocks - 1):
            yield [mode, *rest]
    for length in range(2, blocks + 1):
        for inner in insides(length):
            for rest in plans(blocks - length):
                yield [inner, *rest]


def length_of(item: Any) -> int:
    return 1 if isinstance(item, str) else sum(length_of(part) for part in item)


class Played:
    """The peak and the seconds of a way to compute, step by step."""

    def __init__(self, problem: ModeProblem, inner: list[InnerCost], plan: Inner) -> None:
        self.stages, self.inner = problem.stages, inner
        self.peak, self.seconds = 0, 0.0
        kept = first = 0
        for item in plan:
            stop = first + length_of(item)
            if isinstance(item, str):
                cost = self.stages[first].costs[item]
                self.peak = max(self.peak, kept + cost.forward, kept + cost.backward)
                self.peak = max(self.peak, kept + cost.kept + self.stages[first].between)
                self.seconds += cost.seconds
                kept += cost.kept
            else:
                start = kept + inner[first].input
                for place in range(first, stop):
                    output = inner[place + 1].input if place + 1 < len(inner) else 0
                    held = inner[place].input if place > first else 0
                    self.peak = max(self.peak, start + held + self.stages[place].costs["full"].forward)
                    self.peak = max(self.peak, start + output + self.stages[place].between)
                self.seconds += self.again(first, stop)
                self.inside(item, first, stop - 1, start)
                kept = start
            first = stop

    def again(self, first: int, stop: int) -> float:
        return sum(self.ends(place) * self.inner[place].longer for place in range(first, stop))

    def ends(self, place: int) -> float:
        """The seconds of a run of which no later block takes the result."""
        costs = self.stages[place].costs
        return costs["full"].seconds - costs["keep"].seconds

    def inside(self, items: Inner, first: int, last: int, kept: int) -> None:
        base = self.inner[last].base
        for item in items:
            stop, cost = first + length_of(item), self.inner[first]
            if isinstance(item, str):
                self.peak = max(self.peak, kept + base + cost.keeping)
                self.peak = max(self.peak, kept + cost.base + cost.kept - cost.input + cost.backward)
                self.seconds += self.stages[first].costs["keep"].seconds
                if first == last:
                    self.seconds -= self.ends(last) * (cost.longer - 1)
                kept += cost.kept - cost.input + (self.inner[first + 1].input if first < last else 0)
            else:
                for place in range(first, stop):
                    held = self.inner[place].input if place > first else 0
                    self.peak = max(self.peak, kept + base + held + self.inner[place].passing)
                self.seconds += self.again(first, stop)
                self.inside(item, first, stop - 1, kept)
                kept += self.inner[stop].input
            first = stop


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_brute_force(seed: int) -> None:
    blocks = 2 + seed % 4
    problem, inner = problem_of(blocks, seed)
    ways = [Played(problem, inner, plan) for plan in plans(blocks)]
    most = max(way.peak for way in ways) + 1
    ground = min(cost.base for cost in inner)
    solver = RegionSolver(problem, inner, most, slots=most - ground)  # one slot for each byte
    for budget in range(most):
        fastest = min((way.seconds for way in ways if way.peak <= budget), default=None)
        choice = solver.solve(budget)
        assert (choice is None) == (fastest is None)
        if choice is not None:
            assert choice.seconds == fastest
    assert solver.least() == min(way.peak for way in ways)


def _resnet() -> tuple[nn.Module, Any, Any]:
    with torch.device("meta"):
        return resnet50(), (torch.empty(32, 3, 224, 224), torch.empty(32).long()), nn.CrossEntropyLoss()


def _gpt2() -> tuple[nn.Module, Any, Any]:
    ids = torch.zeros(16, 64, dtype=torch.long)
    return gpt2(8, 128), {"input_ids": ids, "labels": ids}, None


def _llama() -> tuple[nn.Module, Any, Any]:
    sizes = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=2048, **sizes))
        ids = torch.empty(8, 1024, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}, None


@pytest.mark.parametrize("made", [_resnet, _llama])
def test_predicted_seconds_are_those_of_the_play(made: Any) -> None:
    """Also where a block ends with a product: only in the second run of a region's last block it is not
    computed.
    """
    model, batch, criterion = made()
    planner = CheckpointPlanner(model, batch, criterion=criterion, device="h200")
    regions = planner.search._regions
    assert regions is not None
    found = set()
    for share in (0.0, 0.02, 0.1):
        budget = int(planner.least[2] + share * (planner.whole - planner.least[2]))
        choice = regions.solve(budget)
        if choice is None or not choice.regions or "offload" in choice.modes:  # the play has no host
            continue
        found.add(len(choice.regions))
        assert choice.seconds == pytest.approx(planner.search.judge(choice).line.seconds, rel=3e-3)
    assert found


@pytest.mark.parametrize("made", [_resnet, _gpt2])
def test_never_slower_than_any_segments(made: Any) -> None:
    """Whatever the number of segments: with the bytes that they need, a plan takes no longer."""
    model, batch, criterion = made()
    planner = CheckpointPlanner(model, batch, criterion=criterion, device="h200")
    chain = planner.chain()
    solver = CheckpointSolverChen(chain)
    for count in (2, 8):
        (judged,) = planner.search.segmented([solver._cut(sum(chain.xbar) / count)])
        peak = judged.peak + planner.unseen
        assert planner.plan(max(peak, planner.least[2])).seconds <= 1.005 * judged.choice.seconds
        assert judged.choice.seconds == pytest.approx(judged.line.seconds, rel=1e-2)
