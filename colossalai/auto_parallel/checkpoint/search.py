"""Finds the fastest choice of modes and regions whose step, when it is played, stays within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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
_CLOSE = 200  # a budget of which less than this part is left needs no other choice


class Judged(NamedTuple):
    """A choice, its step as it was played, and the peak with what was measured besides."""

    choice: Choice
    line: StepTimeline
    peak: int


@dataclass
class Search:
    """What is known of a model's costs, and the play that judges a choice.

    ``alike``: the steps with one mode for all blocks, which were played before.  ``inner``: costs inside of
    regions; without these there are none.  ``plays_tell``: whether the peak of a choice is that of its play,
    or of a step that is compiled, of which the costs alone tell it.
    """

    problem: ModeProblem
    measured: Measured
    alike: list[Judged]
    inner: list[InnerCost] | None
    judge: Callable[[Choice], Judged]
    plays_tell: bool = True
    _plays: dict[tuple[Any, ...], Judged] = field(default_factory=dict)

    @cached_property
    def _regions(self) -> RegionSolver | None:
        if self.inner is None or len(self.inner) < 2:
            return None
        return RegionSolver(self.problem, self.inner, peak_of(self.problem, ["keep"] * len(self.inner)))

    def predicted(self, budget: int) -> Choice | None:
        """The fastest choice for a budget by the costs alone."""
        single = solve_modes(self.problem, budget)
        grouped = self._regions.solve(budget) if self._regions is not None else None
        found = [choice for choice in (single, grouped) if choice is not None]
        return min(found, key=lambda choice: choice.seconds, default=None)

    def find(self, budget: int, time_limit: float, *, regions: bool = True) -> Judged | None:
        """The best choice, with or without regions, whose step stays within ``budget`` when it is played."""
        known = [one for one in self._plays.values() if regions or not one.choice.regions]
        best = min(
            (one for one in [*self.alike, *known] if one.peak <= budget),
            key=lambda one: one.choice.seconds,
            default=None,
        )
        if best is not None and not best.choice.regions and {"keep"} >= set(best.choice.modes):
            return best  # nothing is computed again
        best = self._single(budget, time_limit, best)
        if regions and (best is None or best.choice.regions or {"full", "offload"} & set(best.choice.modes)):
            best = self._grouped(budget, best)
        return best if best is not None or self.least.peak > budget else self.least

    def segmented(self, cuts: Iterable[Sequence[tuple[int, int]]]) -> list[Judged]:
        """Choices whose regions are the segments of these cuts, as they were played."""
        solver, found = self._regions, list[Choice]()
        for cut in cuts if solver is not None else ():
            if solver is not None and all(solver.groups(first, stop) for first, stop in cut[:-1]):
                found.append(solver.segmented(cut))
        return [self._judged(choice) for choice in found]

    def _single(self, budget: int, time_limit: float, best: Judged | None) -> Judged | None:
        """Modes of single blocks; what a play shows otherwise than predicted corrects the costs."""
        problem, seen = self.problem, set()
        for _ in range(_ROUNDS):
            choice = solve_modes(problem, budget, time_limit)
            if choice is None or tuple(choice.modes) in seen:
                break
            seen.add(tuple(choice.modes))
            judged = self._judged(choice)
            if judged.peak <= budget and (best is None or choice.seconds < best.choice.seconds):
                best = judged
            if not self.plays_tell:
                break
            problem = corrected(problem, choice.modes, judged.line, self.measured)
        return best

    def _grouped(self, budget: int, best: Judged | None) -> Judged | None:
        """With regions, if these are faster.

        How much regions need is predicted roughly, mostly as more than a play shows.  So they are chosen for
        the largest limit, above or below ``budget``, at which their play stays within it.
        """
        limit, low, high = budget, 0, budget + budget // 7
        for _ in range(_ROUNDS if self._regions is not None else 0):
            choice = self._regions.solve(limit) if self._regions is not None else None
            if choice is None or (best is not None and choice.seconds >= _FASTER * best.choice.seconds):
                low = limit  # a lower limit gives none that is faster
            elif (judged := self._judged(choice)).peak <= budget:
                best, low = judged, limit
            else:
                high = limit
            if high - low < budget // _CLOSE:
                break
            limit = (max(low, high - budget // 10) + high) // 2
        return best

    def _judged(self, choice: Choice) -> Judged:
        """What a play of ``choice`` shows; one that was played before is not played again."""
        key = (tuple(choice.modes), tuple(choice.regions))
        if key not in self._plays:
            self._plays[key] = self.judge(choice)
        return self._plays[key]._replace(choice=choice)

    @cached_property
    def least(self) -> Judged:
        """The choice with the least peak."""
        single = solve_modes(self.problem, least_budget(self.problem))
        assert single is not None
        best = self._judged(single)
        grouped = self._regions.solve(self._regions.least()) if self._regions is not None else None
        if grouped is not None and grouped.regions:
            judged = self._judged(grouped)
            best = judged if judged.peak < best.peak else best
        return best
