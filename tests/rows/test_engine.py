"""Sequences that are cut over ranks, through the engine: handlers, ZeRO sections and pipelines."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from colossalai.booster import Booster
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import SequenceParallelGradientHandler
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun, cut
from tests.rows.plans import (
    CLIP,
    PLUGINS,
    ClippedSerial,
    close_weights,
    differing,
    launch,
    problem,
    saved_weights,
    to_plan,
    token_loss,
)

HANDLER = [{"type": "SequenceParallelGradientHandler"}]


def engine(task: Problem, **plan: Any) -> PipelineRun:
    """An engine whose pipeline may have one stage; ranks start from different weights."""
    launch(**plan)
    run = PipelineRun(task, token_loss, convert=differing)
    if gpc.pipeline_parallel_size > 1:
        (handler,) = run.engine.gradient_handlers
        assert type(handler) is SequenceParallelGradientHandler
    return run


PIPED = {"pipeline": 2, "sequence": 2, "NUM_MICRO_BATCHES": 2}


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"sequence": 2}, 2),
        ({"sequence": 2, "gradient_handler": HANDLER}, 4),
        (PIPED, 4),
        (PIPED | {"tensor": {"size": 2, "mode": "1d"}}, 8),
        (PIPED, 8),
    ],
    ids=["ddp", "handler-dp2", "pp2", "pp2-tp2", "pp2-dp2"],
)
def test_every_gradient(plan: dict[str, Any], ranks: int) -> None:
    assert_equal_to_serial(problem, partial(engine, **plan), ranks)


def forgets_the_sequence(task: Problem) -> PipelineRun:
    run = engine(task, **PIPED)
    run.engine.gradient_handlers.clear()
    return run


def test_a_pipeline_of_one_replica_that_does_not_average_is_wrong() -> None:
    with pytest.raises(RankError, match=r"ParityError: gradient at step 0 of .* differs"):
        assert_equal_to_serial(problem, forgets_the_sequence, 4)


def check_booster(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(**PIPED)
    for plugin in (None, *PLUGINS):
        task = problem()
        serial = ClippedSerial(task)
        place = Placement(gpc.pipeline_parallel_size, 1, Shape.LOOP)
        (stage,) = cut(task.build(), place, gpc.mesh.coord["pp"])  # type: ignore[arg-type]
        change = differing if plugin is not None else to_plan  # alone, a booster brings no weights to others
        stage = nn.Sequential(OrderedDict((n, change(m)) for n, m in stage.named_children()))
        booster = Booster(device="cpu", plugin=None if plugin is None else PLUGINS[plugin]())
        model, optimizer, *_ = booster.boost(stage, task.optimizer(stage.parameters()))
        for batch in task.batches:
            serial.forward_backward(batch)
            serial.update()
            booster.execute_pipeline(iter([batch]), model, token_loss, optimizer)
            optimizer.clip_grad_by_norm(CLIP)
            optimizer.step()
            optimizer.zero_grad()
        close_weights(saved_weights(booster, model, folder), serial)


def test_a_booster_averages_over_the_sequence(tmp_path: Path) -> None:
    """The pipeline of one replica, which averaged nothing when only data-parallel ranks counted."""
    spawn(check_booster, 4, folder=str(tmp_path))
