"""The fuzzer: it finds nothing in a fixed set of cases, it finds what is planted, and it makes a small script
of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from colossalai.testing.fuzz.__main__ import main
from colossalai.testing.fuzz.cases import Case, OptimizerSpec, random_case
from colossalai.testing.fuzz.habits import Habit
from colossalai.testing.fuzz.judge import EQUAL
from colossalai.testing.fuzz.models import BlockSpec, ModelSpec
from colossalai.testing.fuzz.plans import PlanSpec
from colossalai.testing.fuzz.runner import RANKS, FailedCase, Summary, fuzz, seeded_cases
from colossalai.testing.fuzz.script import script_text
from colossalai.zero import LowLevelZeroOptimizer

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0.5"))


def _check(summary: Summary) -> None:
    told = "\n\n".join(f"{f.verdict.message}\n{f.case.to_json()}\n{f.script}" for f in summary.failures)
    assert not summary.failed, f"{summary.text()}\n{told}"
    # a fuzzer that only sees refusals sees nothing
    plain = ("none", "ddp", "fsdp", "zero1", "zero2", "gemini")
    for name, outcomes in summary.by_plan.items():
        if name in plain and (count := sum(outcomes.values())) >= 10:
            assert outcomes[EQUAL] >= 0.4 * count, summary.text()


def test_random_cases_are_equal_or_refused() -> None:
    _check(fuzz(seeded_cases(60, 200), minutes=MINUTES, most_failures=1))


@pytest.mark.slow
def test_an_hour_of_random_cases() -> None:
    _check(fuzz(seeded_cases(1, None), minutes=60, most_failures=10))


def _forget_to_reduce() -> None:
    """A planted bug: under ZeRO each rank keeps its own gradients."""
    from colossalai.zero.low_level import reducer

    def own(buffer: Tensor, layout: Any, group: Any) -> Any:
        low, high = layout.bounds(dist.get_rank(group))
        return buffer[low:high] * dist.get_world_size(group), lambda: None

    reducer.start_reduction = own


def _forget_the_states() -> None:
    """A planted bug: loading leaves out the states of the optimizer."""
    from colossalai.checkpoint_io.optimizer_state import OptimizerState

    commit = OptimizerState._commit
    OptimizerState._commit = lambda self, loaded, *rest: commit(  # type: ignore[method-assign]
        self, {value: {} for value in loaded}, *rest
    )


def _one_rank_raises() -> None:
    """A planted bug: one of the ranks finds something wrong in the second step, and the others wait for
    it.
    """
    step = LowLevelZeroOptimizer.step

    def raising(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 alone does not like this")
        return step(self, *args)

    LowLevelZeroOptimizer.step = raising  # type: ignore[method-assign]


def _never_ends() -> None:
    """A planted bug: the last rank never comes to the collective."""
    step = LowLevelZeroOptimizer.step

    def waiting(self: Any, *args: Any) -> Any:
        if dist.get_rank() == 1:
            threading.Event().wait()
        return step(self, *args)

    LowLevelZeroOptimizer.step = waiting  # type: ignore[method-assign]


def _large(**options: Any) -> Case:
    """A case with much that has nothing to do with the planted bugs."""
    kinds = ("InputLayer", [5, 4]), ("Mlp", [4, 8]), ("NormLayer", [4]), ("Own", [4]), ("OutputLayer", [4, 3])
    return Case(
        ModelSpec([BlockSpec(kind, args, i) for i, (kind, args) in enumerate(kinds)], root="Net"),
        a=PlanSpec(2, "zero", {"stage": 1, "overlap_communication": False}),
        optimizer=OptimizerSpec("torch.optim.AdamW", {"lr": 0.02}, groups=True),
        steps=4,
        habits=[Habit("evaluate"), Habit("clip norm", value=0.5), Habit("edit rate", at=1)],
        **options,
    )


def _found(case: Case, bug: Callable[[], None], **options: Any) -> FailedCase:
    summary = fuzz([case], prepare=bug, **options)
    assert summary.failed == 1
    return summary.failures[0]


def test_a_lost_reduction_is_found_and_made_small(tmp_path: Path) -> None:
    failure = _found(_large(), _forget_to_reduce, shrink_seconds=300, folder=tmp_path)
    assert failure.verdict.outcome == "different"
    small = failure.case
    assert not small.habits
    assert [b.kind for b in small.model.blocks] == ["InputLayer", "OutputLayer"]
    assert small.optimizer == OptimizerSpec()
    assert small.a == PlanSpec(2, "zero", {"stage": 1})
    # what was written repeats the case: without the bug it ends well
    script = tmp_path / "case-0-0.py"
    assert script.read_text() == failure.script
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "plan_a on 2 ranks" in done.stdout
    assert "0.proj.weight: off by" in done.stdout


def test_forgotten_states_are_found() -> None:
    again = PlanSpec(1, "ddp")
    failure = _found(_large(save_at=2, b=again), _forget_the_states, shrink_seconds=0)
    assert failure.verdict.outcome == "different"
    assert "plan_b" in failure.verdict.message


def test_a_rank_that_raises_alone_is_found() -> None:
    verdict = _found(_large(), _one_rank_raises, shrink_seconds=0).verdict
    assert verdict.outcome == "disagree"
    assert "rank 1 alone does not like this" in verdict.message


def test_a_hang_is_found_with_the_place() -> None:
    verdict = _found(_large(), _never_ends, shrink_seconds=0, limit=15).verdict
    assert verdict.outcome == "hang"
    assert "in waiting" in verdict.details


def test_cases_follow_from_their_numbers_and_survive_json() -> None:
    for index in range(50):
        case = random_case(3, index, list(RANKS))
        assert case == random_case(3, index, list(RANKS)) == Case.from_json(case.to_json())
        compile(script_text(case), "case", "exec")
    assert random_case(3, 0, [1]) != random_case(4, 0, [1])


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(
        Case(
            ModelSpec([BlockSpec("InputLayer", [5, 4]), BlockSpec("OutputLayer", [4, 3], 1)]), PlanSpec()
        ).to_json()
    )
    assert main(["--case", str(file)]) == 0
    assert "1 cases in" in capsys.readouterr().out
    assert main(["--case", "0:3", "--script"]) == 0
    assert "def serial(log, snap, cuts):" in capsys.readouterr().out
