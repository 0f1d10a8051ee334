"""Experts that ranks with different tokens share out, under every plugin: each parameter is averaged, and its
states are divided, over the ranks that hold the same of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from tests.pipeline.plans import HIDDEN, Block
from tests.rows.experts import Experts
from tests.rows.plans import WORDS, Cut, CutRun, check_trained, launch, problem


def build(experts: tuple[int, ...] = (4,), open_: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for n in experts for layer in (Experts(HIDDEN, n, open_), Block())]
    return nn.Sequential(Cut(), nn.Embedding(WORDS, HIDDEN), *layers, nn.Linear(HIDDEN, WORDS))


def decaying(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A gradient of zeros is not the same as none."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def experts_problem(experts: tuple[int, ...] = (4,), open_: int | None = None) -> Problem:
    task = problem()
    return Problem(
        build=partial(build, experts, open_), batches=task.batches, loss=task.loss, optimizer=decaying
    )


def ddp(task: Problem, accumulate: int = 1, **plan: Any) -> CutRun:
    launch(**plan)
    return CutRun(task, TorchDDPPlugin(), accumulate=accumulate)


@pytest.mark.parametrize(
    ("plan", "ranks", "options"),
    [
        ({"moe": {"size": 2}}, 2, {}),
        ({"moe": {"size": 2}}, 4, {"accumulate": 2}),
        ({"moe": {"size": 4}}, 4, {"experts": (8, 2, 4)}),
        ({"moe": {"size": 2}}, 4, {"open_": 2}),
        ({"moe": {"size": 2}}, 2, {"open_": 0}),
        ({"moe": {"size": 2}, "sequence": 2}, 4, {}),
        ({"moe": {"size": 2}, "tensor": {"size": 2, "mode": "1d"}}, 4, {}),
    ],
)
def test_every_gradient_under_ddp(plan: dict[str, Any], ranks: int, options: dict[str, Any]) -> None:
    accumulate = options.pop("accumulate", 1)
    assert_equal_to_serial(
        partial(experts_problem, **options), partial(ddp, accumulate=accumulate, **plan), ranks
    )


def check_sharded(
    rank: int, world_size: int, port: int, folder: str, plugins: Iterable[str], options: dict[str, Any], **plan: Any
) -> None:
    launch(**plan)
    accumulate = options.pop("accumulate", 1)
    for name in plugins:
        check_trained(experts_problem(**options), name, folder, accumulate=accumulate)


@pytest.mark.parametrize(
    ("plan", "ranks", "options"),
    [
        ({"moe": {"size": 2}}, 2, {}),
        ({"moe": {"size": 2}}, 4, {"accumulate": 2}),
        ({"moe": {"size": 4}}, 4, {"experts": (8, 2, 4)}),
        ({"moe": {"size": 2}}, 4, {"open_": 2}),
        ({"moe": {"size": 2}}, 2, {"open_": 2}),
        ({"moe": {"size": 2}, "sequence": 2}, 4, {}),
        ({"moe": {"size": 2}, "tensor": {"size": 2, "mode": "1d"}}, 4, {}),
    ],
)
def test_sharded_plans(plan: dict[str, Any], ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    spawn(check_sharded, ranks, folder=str(tmp_path), plugins=("gemini",), options=options, **plan)
