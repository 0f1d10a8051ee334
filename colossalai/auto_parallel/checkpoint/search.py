"""Finds the fastest choice of modes and regions whose step, when it is played, stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from colossalai.auto_parallel.checkpoint.mode_solver import (
    Choice,
    ModeProblem,
    least_budget,
    peak_of,
    solve_modes,
)
from colossalai.auto_parallel.checkpoint.profile import Measured, corrected
from colossalai.auto_parallel.checkpoint.region_solver import InnerCost, RegionSolver
from colossalai.auto_parallel.checkpoint.timeline import StepTimeline

_ROUNDS = 8
_FASTER = 0.995  # a region must be worth it


class Judged(NamedTuple):
    """A choice, its step as it was played, and the peak with what was measured besides."""

    choice: Choice
    line: StepTimeline
    peak: int


@dataclass
class Search:
    """What is known of a model's costs, and the play that judges a choice.

    ``alike``: the steps with one mode for all blocks, which were played before.  ``inner``: costs inside of
    regions; without these there are none.
    """

    problem: ModeProblem
    measured: Measured
    alike: list[Judged]
    inner: list[InnerCost] | None
    judge: Callable[[Choice], Judged]

    @cached_property
    def _regions(self) -> RegionSolver | None:
        """For budgets up to what single blocks that are computed again need, where regions pay."""
        if self.inner is None or len(self.inner) < 2:
            return None
        full = peak_of(self.problem, ["full"] * len(self.inner))
        return RegionSolver(self.problem, self.inner, full + full // 8)

    def predicted(self, budget: int) -> Choice | None:
        """The fastest choice for a budget by the costs alone."""
        single = solve_modes(self.problem, budget)
        grouped = self._regions.solve(budget) if self._regions is not None else None
        found = [choice for choice in (single, grouped) if choice is not None]
        return min(found, key=lambda choice: choice.seconds, default=None)

    def find(self, budget: int, time_limit: float, *, regions: bool = True) -> Judged | None:
        """The best choice, with or without regions, whose step stays within ``budget`` when it is played."""
        best = min(
            (one for one in self.alike if one.peak <= budget),
            key=lambda one: one.choice.seconds,
            default=None,
        )
        if best is not None and best.choice.modes[:1] in ([], ["keep"]):
            return best
        best = self._single(budget, time_limit, best)
        if regions and (best is None or {"full", "offload"} & set(best.choice.modes)):
            best = self._grouped(budget, best)
        return best if best is not None or self.least.peak > budget else self.least

    def _single(self, budget: int, time_limit: float, best: Judged | None) -> Judged | None:
        """Modes of single blocks; what a play shows otherwise than predicted corrects the costs."""
        problem, seen = self.problem, set()
        for _ in range(_ROUNDS):
            choice = solve_modes(problem, budget, time_limit)
            if choice is None or tuple(choice.modes) in seen:
                break
            seen.add(tuple(choice.modes))
            judged = self.judge(choice)
            if judged.peak <= budget and (best is None or choice.seconds < best.choice.seconds):
                best = judged
            problem = corrected(problem, choice.modes, judged.line, self.measured)
        return best

    def _grouped(self, budget: int, best: Judged | None) -> Judged | None:
        """With regions, if these are faster; what a play needs more than predicted is taken off."""
        limit = budget
        for _ in range(_ROUNDS):
            choice = self._regions.solve(limit) if self._regions is not None else None
            if choice is None or (best is not None and choice.seconds >= _FASTER * best.choice.seconds):
                break
            judged = self.judge(choice)
            if judged.peak <= budget:
                return judged
            limit -= judged.peak - budget
        return best

    @cached_property
    def least(self) -> Judged:
        """The choice with the least peak."""
        single = solve_modes(self.problem, least_budget(self.problem))
        assert single is not None
        best = self.judge(single)
        grouped = self._regions.solve(self._regions.least()) if self._regions is not None else None
        if grouped is not None and grouped.regions:
            judged = self.judge(grouped)
            best = judged if judged.peak < best.peak else best
        return best
