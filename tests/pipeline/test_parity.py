"""Every schedule trains as the serial model does."""

from __future__ import annotations

from functools import partial

from colossalai.testing import parametrize_sample
from colossalai.testing.parity import assert_equal_to_serial
from tests.pipeline.plans import plan, problem, tensor_plan, token_problem

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


@parametrize_sample("schedule, stages, microbatches, chunks, data", CASES, n=10)
def test_schedules_equal_the_serial_model(
    schedule: str, stages: int, microbatches: int, chunks: int, data: int
) -> None:
    run = partial(plan, schedule=schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    assert_equal_to_serial(problem, run, stages * data)


TENSOR_CASES = [
    (schedule, stages, microbatches, chunks, mode, size, data)
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
    for stages in (2, 3)
    for microbatches in (1, 4, 8)
    for mode, size in (("1d", 2), ("2d", 4))
    for data in (1, 2)
    if schedule != "interleaved" or microbatches % stages == 0
]


@parametrize_sample("schedule, stages, microbatches, chunks, mode, size, data", TENSOR_CASES, n=3)
def test_tensor_modes_inside_the_stages(
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
