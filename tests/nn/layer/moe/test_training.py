"""Models with experts train as the serial model does: engine, pipelines, clipping, accumulation and
recomputation.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from colossalai.testing import RankError, spawn
from tests.nn.layer.moe.training import MICRO, Task, Trained, by_engine, by_pipeline, compare, launch, serial

TASKS = {
    "plain": Task(),
    "top1-clip": Task(k=1, capacity=0.8, clip=True),
    "full": Task(recompute="full"),
    "selective": Task(recompute="selective", clip=True),
    "bias": Task(bias_rate=0.05, recompute="full"),
}
TP, SP = {"tensor": {"size": 2, "mode": "1d"}}, {"sequence": 2}
ENGINE: dict[str, tuple[dict[str, Any], int]] = {
    "ep2": ({"moe": 2}, 2),
    "dp2-ep2": ({"moe": {"size": 2}}, 4),
    "ep2-tp2": ({"moe": 2, **TP}, 4),
    "ep2-sp2": ({"moe": 2, **SP}, 4),
}
PIPELINE: dict[str, tuple[dict[str, Any], int]] = {
    "pp2": ({"pipeline": 2}, 2),
    "zbh1": ({"pipeline": {"size": 2, "schedule": "zbh1"}}, 2),
    "pp2-ep2": ({"pipeline": 2, "moe": 2}, 4),
    "pp2-ep2-tp2": ({"pipeline": 2, "moe": 2, **TP}, 8),
}


def grid(plans: dict[str, Any]) -> list[Any]:
    """Every task under every plan; CI runs each plan with some tasks, and each task under some plans."""
    cases = []
    for i, plan in enumerate(plans):
        for j, task in enumerate(TASKS):
            marks = () if i == 0 or (j + i) % len(TASKS) == 0 else pytest.mark.slow
            cases.append(pytest.param(task, *plans[plan], id=f"{plan}-{task}", marks=marks))
    return cases


@cache
def expected(name: str) -> Trained:
    return serial(TASKS[name])


def _engine(name: str, parallel: dict[str, Any], want: Trained, **place: Any) -> None:
    launch(TASKS[name], parallel, gradient_accumulation=MICRO)
    compare(by_engine(TASKS[name]), want, loads=not TASKS[name].recompute)


@pytest.mark.parametrize(("task", "parallel", "ranks"), grid(ENGINE))
def test_engine(task: str, parallel: dict[str, Any], ranks: int) -> None:
    spawn(partial(_engine, task, parallel, expected(task)), ranks)


def _pipeline(name: str, parallel: dict[str, Any], want: Trained, **place: Any) -> None:
    launch(TASKS[name], parallel, NUM_MICRO_BATCHES=MICRO)
    compare(by_pipeline(TASKS[name]), want, loads=False)


@pytest.mark.parametrize(("task", "parallel", "ranks"), grid(PIPELINE))
def test_pipeline(task: str, parallel: dict[str, Any], ranks: int) -> None:
    spawn(partial(_pipeline, task, parallel, expected(task)), ranks)


def _hidden(**place: Any) -> None:
    task = Task(recompute="reentrant")
    launch(task, {"pipeline": 2}, NUM_MICRO_BATCHES=MICRO)
    by_pipeline(task)


def test_losses_that_a_checkpoint_hides_are_refused_in_pipelines() -> None:
    with pytest.raises(RankError, match=r"stage 0 of the pipeline .* use_reentrant=False"):
        spawn(_hidden, 2)
