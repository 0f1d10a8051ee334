"""The controlled stages of the pipeline benchmark do the work they are said to do, where they are said to do
it.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import pipeline as benchmark
from colossalai.pipeline.executor import Executor
from colossalai.pipeline.schedule import BUBBLES, SCHEDULES, PassKind
from colossalai.testing import spawn

HALVES = ["input", "weight"]
WORK = {
    PassKind.FORWARD: ["forward"],
    PassKind.BACKWARD: HALVES,
    PassKind.INPUT_GRAD: ["input"],
    PassKind.WEIGHT_GRAD: ["weight"],
}


def check_work(rank: int, world_size: int, port: int, schedule: str) -> int:
    """Each action waits as the schedule's price says; on a clock that does not run, so that nothing takes
    time.
    """
    waits: list[tuple[str, float]] = []
    benchmark.wait = lambda what, seconds: waits.append((what, seconds))
    compute, checked = Executor._compute, []

    def noted(self: Executor, action: Any, received: Any) -> Any:
        waits.clear()
        result = compute(self, action, received)
        expected = WORK[action.kind]
        if self._stage(action) == 0 and action.kind is PassKind.INPUT_GRAD:
            expected = []  # nobody waits for it, so it is done with the weights'
        if self._stage(action) == 0 and action.kind is PassKind.WEIGHT_GRAD:
            expected = HALVES
        assert sorted(what for what, _ in waits) == expected, action
        assert {seconds for _, seconds in waits} <= {1.0 / benchmark.SCHEDULES[schedule]}
        checked.append(action)
        return result

    Executor._compute = noted  # type: ignore[method-assign]
    recording = benchmark.run(rank, world_size, port, schedule, 4, 1.0, 2)
    assert len(recording.steps) == (2 if rank == 0 else 0)
    return len(checked)


@pytest.mark.parametrize("schedule", benchmark.SCHEDULES)
def test_the_work_of_a_stage(schedule: str) -> None:
    chunks = benchmark.SCHEDULES[schedule]
    kinds = 3 if schedule.startswith("zb") else 2
    assert spawn(check_work, 2, schedule=schedule) == [2 * 4 * chunks * kinds] * 2


def test_every_schedule_is_measured_and_has_a_formula() -> None:
    assert list(benchmark.SCHEDULES) == list(SCHEDULES)
    for ranks, microbatches in benchmark.SIZES:
        assert all(BUBBLES[name](ranks, microbatches, c) for name, c in benchmark.SCHEDULES.items())
