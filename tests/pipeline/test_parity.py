"""Every schedule trains as the serial model does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import colossalai.pipeline.pipeline as pipeline
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.testing import RankError, parametrize_sample
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun
from tests.pipeline.plans import MakePlugin, plan, problem, tensor_plan, token_problem

CHUNKS = {"gpipe": (1, 2), "1f1b": (1,), "interleaved": (1, 2), "zbh1": (1,), "zbv": (2,)}

CASES = [
    (schedule, stages, microbatches, chunks, data)
    for schedule in ("gpipe", "1f1b", "interleaved", "zbh1", "zbv")
    for stages in (2, 3, 4)
    for microbatches in (1, 4, 8)
    for chunks in (1, 2)
    for data in (1, 2)
    if chunks in CHUNKS[schedule] and (schedule != "interleaved" or microbatches % stages == 0)
]


@parametrize_sample("schedule, stages, microbatches, chunks, data", CASES, n=6)
def test_schedules_equal_the_serial_model(
    schedule: str, stages: int, microbatches: int, chunks: int, data: int
) -> None:
    run = partial(plan, schedule=schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    assert_equal_to_serial(problem, run, stages * data)


@pytest.mark.parametrize(
    ("plugin", "schedule"),
    [
        (None, "interleaved"),  # by an engine
        (TorchDDPPlugin, "interleaved"),
        (TorchDDPPlugin, "zbv"),
        (TorchFSDPPlugin, "1f1b"),
        (TorchFSDPPlugin, "interleaved"),
    ],
)
def test_plugins_around_the_stages(plugin: MakePlugin | None, schedule: str) -> None:
    """With several chunks on a rank: a pass of one of them is not all of a pass."""
    chunks = CHUNKS[schedule][-1]
    run = partial(plan, schedule=schedule, stages=2, microbatches=4, chunks=chunks, plugin=plugin)
    # FSDP2 takes no stage that begins with an operation in place
    assert_equal_to_serial(token_problem if plugin is TorchFSDPPlugin else problem, run, 4)


def test_fsdp_around_stages_and_tensor_parallelism() -> None:
    run = partial(
        tensor_plan,
        schedule="1f1b",
        stages=2,
        microbatches=2,
        chunks=1,
        mode="1d",
        size=2,
        plugin=TorchFSDPPlugin,
    )
    assert_equal_to_serial(token_problem, run, 8)


TENSOR_CASES = [
    (schedule, stages, microbatches, chunks, mode, size, data)
    for mode, size in (("1d", 2), ("2d", 4))
    for schedule, all_chunks in CHUNKS.items()
    for chunks in all_chunks
    for stages in (2, 3, 4)
    for microbatches in (1, 4, 8)
    for data in (1, 2)
    if schedule != "interleaved" or microbatches % stages == 0
]


SMALL = [
    case for case in TENSOR_CASES if case[1] * case[5] * case[6] <= 8
]  # ranks that a laptop starts in a second
LARGE = [case for case in TENSOR_CASES if case not in SMALL]


@parametrize_sample("schedule, stages, microbatches, chunks, mode, size, data", SMALL, n=4)
def test_tensor_modes_inside_the_stages(
    schedule: str, stages: int, microbatches: int, chunks: int, mode: str, size: int, data: int
) -> None:
    check_tensor_modes(schedule, stages, microbatches, chunks, mode, size, data)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks", "mode", "size", "data"), LARGE)
def test_tensor_modes_on_many_ranks(
    schedule: str, stages: int, microbatches: int, chunks: int, mode: str, size: int, data: int
) -> None:
    check_tensor_modes(schedule, stages, microbatches, chunks, mode, size, data)


def check_tensor_modes(
    schedule: str, stages: int, microbatches: int, chunks: int, mode: str, size: int, data: int
) -> None:
    run = partial(
        tensor_plan,
        schedule=schedule,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        mode=mode,
        size=size,
    )
    assert_equal_to_serial(partial(token_problem, 4 * microbatches * data), run, stages * size * data)


def sums_losses(task: Problem) -> PipelineRun:
    """A pipeline that forgets that the loss of a batch is the mean of those of its micro-batches."""
    original = pipeline.Pipeline.finish

    def finish(self: pipeline.Pipeline, output: Any, microbatch: int) -> Any:
        loss = original(self, output, microbatch)
        return None if loss is None else loss * self.microbatches

    pipeline.Pipeline.finish = finish  # type: ignore[method-assign]
    return plan(task, "1f1b", 2, 4)


def swaps_microbatches(task: Problem) -> PipelineRun:
    """A pipeline whose last stage takes the label of another micro-batch."""
    original = pipeline.Pipeline.finish

    def finish(self: pipeline.Pipeline, output: Any, microbatch: int) -> Any:
        return original(self, output, (microbatch + 1) % self.microbatches)

    pipeline.Pipeline.finish = finish  # type: ignore[method-assign]
    return plan(task, "1f1b", 2, 4)


@pytest.mark.parametrize(
    ("broken", "found"), [(sums_losses, "gradient at step 0"), (swaps_microbatches, "loss at step 0")]
)
def test_mistakes_are_found(broken: Any, found: str) -> None:
    with pytest.raises(RankError, match=found):
        assert_equal_to_serial(problem, broken, 2)
