"""Chooses a mode for each block of a chain: the least time with which a step needs at most a budget.

What is alive in the midst of block k is what the blocks before it keep, and what block k itself needs at its
worst moment, in its forward or in its backward pass.  So the choice for the blocks so far matters to the
rest only by the bytes they keep, and of two choices that keep the same the faster one is enough: one walk
along the chain with the best time for every number of bytes finds the optimum.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

MODES = ("keep", "selective", "full", "offload")
_HOLD_OUTPUTS = ("keep", "selective")
"""Modes in which a block may keep its own output, which is the next one's input."""


class ModeCost(NamedTuple):
    """A block in one mode: bytes that it keeps, bytes above those kept before it at its worst moments in both
    passes, and the seconds of both.
    """

    kept: int
    forward: int
    backward: int
    seconds: float
    kept_if_held: int | None = None
    """The bytes that it keeps if the block before it keeps the input in any case; None for the same."""


@dataclass
class ModeStage:
    """One call of a block: its costs by mode, and the bytes above those kept so far that are needed between
    it and the next one.  Stages with the same ``name`` have the same mode.
    """

    name: str
    costs: dict[str, ModeCost]
    between: int = 0
    most: int | None = None
    """The most bytes that may be kept behind it."""


@dataclass
class ModeProblem:
    """A chain, with the bytes and seconds that no mode changes."""

    stages: list[ModeStage]
    least: int = 0
    seconds: float = 0.0
    copies: int = 0
    """How many times what all stages keep lies there besides: other micro-batches of a pipeline."""


@dataclass
class Choice:
    """The modes of all stages; no choice is faster by more than ``gap``, a share of the time.

    ``regions``: the first of several stages that are computed again together, and the one behind their last;
    the modes of these are those of their second run.  A region may lie in another.
    """

    modes: list[str]
    seconds: float
    peak: int
    gap: float = 0.0
    regions: list[tuple[int, int]] = field(default_factory=list)


def does_no_more(one: Choice, other: Choice) -> bool:
    """Whether no block is computed again more often, or waits for the host, with ``one`` and not with
    ``other``; by their costs it takes no longer, either.
    """
    pairs = zip(_extra_work(one), _extra_work(other), strict=True)
    return one.seconds <= other.seconds and all(
        mine <= its and travels <= may for (mine, travels), (its, may) in pairs
    )


def _extra_work(choice: Choice) -> list[tuple[float, bool]]:
    """How often each block is computed again, of which a part counts half and a product at its end, which
    only the next block of a region needs, an eighth; and whether its inputs travel.
    """
    often = {"keep": 0.0, "selective": 0.5, "full": 1.0, "offload": 1.0}
    return [
        (
            often[mode]
            + sum(
                1.0 if place + 1 == stop else 1.125 for first, stop in choice.regions if first <= place < stop
            ),
            mode == "offload",
        )
        for place, mode in enumerate(choice.modes)
    ]


@dataclass
class _Front:
    """Choices for the stages so far of which none keeps less and is faster than another."""

    kept: np.ndarray
    seconds: np.ndarray
    origin: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Place in the front before, and mode, as one number."""


def solve_modes(
    problem: ModeProblem, budget: int, time_limit: float = 10.0, states: int = 50_000
) -> Choice | None:
    """The fastest choice whose peak is at most ``budget``, or None where there is none.

    A block that is called several times has one mode.  Where there are more than ``states`` choices to be
    followed, or after ``time_limit`` seconds, bytes are rounded up, and ``gap`` says what that may cost.
    """
    calls = [stage.name for stage in problem.stages]
    shared = [name for name in dict.fromkeys(calls) if calls.count(name) > 1]
    found: list[Choice] = []
    if problem.copies:
        return _solve_copies(problem, budget, time_limit, states)
    common = [m for m in MODES if all(m in stage.costs for stage in problem.stages if stage.name in shared)]
    for mode in common if shared else ("keep",):
        stages = [_only(stage, mode) if stage.name in shared else stage for stage in problem.stages]
        choice = _solve(stages, problem, budget, time_limit, states)
        found += [choice] if choice is not None else []
    return min(found, key=lambda choice: choice.seconds, default=None)


def _solve_copies(problem: ModeProblem, budget: int, time_limit: float, states: int) -> Choice | None:
    """With copies: what all stages keep counts several times, and is not known before the walk.

    If it lies between two numbers, the copies need at least the lower one, which bounds the time; a choice
    that fits in truth ends this part, else it is halved.
    """
    alone, deadline = replace(problem, copies=0), time.monotonic() + time_limit
    best: Choice | None = None
    parts = [(0.0, 0, sum(max(cost.kept for cost in stage.costs.values()) for stage in problem.stages))]
    while parts and (best is None or parts[0][0] < best.seconds):
        bound, low, high = heapq.heappop(parts)
        if best is not None and time.monotonic() > deadline:
            return replace(best, gap=max(best.gap, best.seconds / bound - 1))
        stages = [*alone.stages[:-1], replace(alone.stages[-1], most=high)]
        choice = solve_modes(replace(alone, stages=stages), budget - problem.copies * low, time_limit, states)
        if choice is None or (best is not None and choice.seconds >= best.seconds):
            continue
        peak = peak_of(problem, choice.modes)
        if peak <= budget:
            best = replace(choice, peak=peak)
            continue
        middle, bound = (low + high) // 2, choice.seconds / (1 + choice.gap)
        heapq.heappush(parts, (bound, low, middle))
        heapq.heappush(parts, (bound, middle + 1, high))
    return best


def kept_by(problem: ModeProblem, modes: Sequence[str]) -> int:
    """The bytes that all stages keep together."""
    kept, held = 0, False
    for stage, mode in zip(problem.stages, modes, strict=True):
        kept, held = kept + _kept(stage.costs[mode], held), mode in _HOLD_OUTPUTS
    return kept


def least_budget(problem: ModeProblem) -> int:
    """The least budget that some choice keeps, to a thousandth."""
    low, high = 0, 1 << 20
    while solve_modes(problem, high) is None:
        low, high = high, 2 * high
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if solve_modes(problem, middle, states=500) else (middle, high)
    return min(high, peak_of(problem, _chosen(problem, high).modes))


def _chosen(problem: ModeProblem, budget: int) -> Choice:
    choice = solve_modes(problem, budget)
    assert choice is not None
    return choice


def peak_of(problem: ModeProblem, modes: Sequence[str]) -> int:
    """The most bytes that are alive at one time with these modes."""
    alone = max([problem.least, *(max(piece) for piece in pieces_of(problem, modes))])
    return alone + problem.copies * kept_by(problem, modes)


def pieces_of(problem: ModeProblem, modes: Sequence[str]) -> list[tuple[int, int, int]]:
    """The peaks of each stage: in its forward pass, after it, and in its backward pass."""
    found, kept, held = [], 0, False
    for stage, mode in zip(problem.stages, modes, strict=True):
        cost = stage.costs[mode]
        after = kept + _kept(cost, held)
        found.append((kept + cost.forward, after + stage.between, kept + cost.backward))
        kept, held = after, mode in _HOLD_OUTPUTS
    return found


def seconds_of(problem: ModeProblem, modes: Sequence[str]) -> float:
    return problem.seconds + sum(s.costs[m].seconds for s, m in zip(problem.stages, modes, strict=True))


def _kept(cost: ModeCost, held: bool) -> int:
    return cost.kept_if_held if held and cost.kept_if_held is not None else cost.kept


def _only(stage: ModeStage, mode: str) -> ModeStage:
    return replace(stage, costs={mode: stage.costs[mode]})


def _solve(
    stages: list[ModeStage], problem: ModeProblem, budget: int, time_limit: float, states: int
) -> Choice | None:
    modes, rounded = _walk(stages, budget, time_limit, states, up=True)
    if modes is None or problem.least > budget:
        return None
    seconds = seconds_of(problem, modes)
    gap = 0.0
    if rounded:
        bound, _ = _walk(stages, budget, time_limit, states, up=False)
        assert bound is not None
        gap = seconds / seconds_of(problem, bound) - 1
    return Choice(modes, seconds, peak_of(problem, modes), gap)


def _walk(
    stages: list[ModeStage], budget: int, time_limit: float, states: int, up: bool
) -> tuple[list[str] | None, bool]:
    """The modes along the best way, and whether bytes were rounded (``up``, or down for a bound)."""
    deadline = time.monotonic() + time_limit
    start = _Front(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64))
    fronts: list[tuple[_Front, _Front]] = [(start, _empty())]  # last output free, or held
    rounded = False
    for stage in stages:
        limit = states if time.monotonic() < deadline else 200
        reached = _advance(fronts[-1], stage, budget)
        thinned = tuple(_thin(front, limit, up) for front in reached)
        rounded |= any(len(a.kept) < len(b.kept) for a, b in zip(thinned, reached, strict=True))
        fronts.append((thinned[0], thinned[1]))
    ends = [(front.seconds.min(), held) for held, front in enumerate(fronts[-1]) if len(front.kept)]
    if not ends:
        return None, rounded
    held = min(ends)[1]
    place = int(fronts[-1][held].seconds.argmin())
    modes = []
    for number in range(len(stages), 0, -1):
        place, code = divmod(int(fronts[number][held].origin[place]), 2 * len(MODES))
        mode, held = divmod(code, 2)
        modes.append(MODES[mode])
    return modes[::-1], rounded


def _advance(fronts: tuple[_Front, _Front], stage: ModeStage, budget: int) -> tuple[_Front, _Front]:
    """The fronts after one more stage, from both of those before it."""
    made: tuple[list[_Front], list[_Front]] = ([], [])
    for held, front in enumerate(fronts):
        for mode, cost in stage.costs.items():
            after = front.kept + _kept(cost, bool(held))
            fits = front.kept + max(cost.forward, cost.backward) <= budget
            fits &= after + stage.between <= budget
            fits &= stage.most is None or after <= stage.most
            places = np.flatnonzero(fits)
            origin = (places * len(MODES) + MODES.index(mode)) * 2 + held
            new = _Front(after[places], front.seconds[places] + cost.seconds, origin)
            made[mode in _HOLD_OUTPUTS].append(new)
    return _best(made[0]), _best(made[1])


def _best(fronts: list[_Front]) -> _Front:
    """Those of all ``fronts`` that no other beats in both bytes and time."""
    if not fronts:
        return _empty()
    kept, seconds, origin = (
        np.concatenate([getattr(front, name) for front in fronts]) for name in ("kept", "seconds", "origin")
    )
    order = np.lexsort((seconds, kept))
    kept, seconds, origin = kept[order], seconds[order], origin[order]
    earlier = np.concatenate([[np.inf], np.minimum.accumulate(seconds)[:-1]])
    better = seconds < earlier
    return _Front(kept[better], seconds[better], origin[better])


def _thin(front: _Front, limit: int, up: bool) -> _Front:
    """At most ``limit`` choices, with their bytes rounded."""
    if len(front.kept) <= limit:
        return front
    low, high = int(front.kept[0]), int(front.kept[-1])
    width = (high - low) // limit + 1
    cell = (front.kept - low + (width - 1 if up else 0)) // width
    # times fall with bytes, so the last of a cell is its fastest
    last = np.flatnonzero(np.append(cell[1:] != cell[:-1], True))
    return _Front(low + cell[last] * width, front.seconds[last], front.origin[last])


def _empty() -> _Front:
    return _Front(np.zeros(0, np.int64), np.zeros(0))
