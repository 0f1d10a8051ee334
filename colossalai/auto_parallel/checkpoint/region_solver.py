"""Chooses regions of several blocks that are computed again together, beside the modes of single blocks.

Of a region the forward pass keeps only the input of its first block.  In the backward pass it is computed
again: then each of its blocks keeps everything, or is computed once more, alone or in a region inside this
one.  A second run ends when all is there that the backward pass needs; so it does not compute a product at
the end of its last block, while it computes those of the others, whose results the next block takes.

There are two tables.  Inside of regions it is Rotor's (see ``rotor.py``): the least time of blocks s to t for
every number of bytes that are left for them.  Outside it is the least time of the blocks from s on, of which
the first gets a mode or begins a region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from colossalai.auto_parallel.checkpoint.mode_solver import Choice, ModeProblem, ModeStage, seconds_of
from colossalai.auto_parallel.checkpoint.rotor import times_from, times_less

_LONGEST = 24
_SLOTS = 2000


def again_in(stage: ModeStage) -> float:
    """The seconds of what mode ``full`` computes again."""
    return max(0.0, stage.costs["full"].seconds - stage.costs["keep"].seconds)


class InnerCost(NamedTuple):
    """A block inside of a region, where it may lie in one.

    ``input``: bytes of what comes from the block before.  ``kept``: what it keeps if it keeps everything, its
    input included.  ``base``: what is alive at its backward pass besides what blocks keep, such as weights
    and gradients.  ``keeping``, ``passing`` and ``backward``: bytes above those before, at the worst moment
    of a forward pass that keeps everything, of one that keeps nothing, and of the backward pass.
    ``longer``: how many times as long a forward pass takes as what mode ``full`` computes again.
    """

    input: int
    kept: int
    base: int
    keeping: int
    passing: int
    backward: int
    longer: float = 1.0
    groups: bool = True


@dataclass(frozen=True)
class _Option:
    """The time of a way to go on, for each number of slots: a mode, or a region that ends before ``stop``."""

    time: np.ndarray
    mode: str = ""
    stop: int = 0


class RegionSolver:
    """The fastest choices of modes and regions for all budgets up to ``most``.

    Blocks that are called several times, write into their inputs or compute gradients lie in no region.
    """

    def __init__(self, problem: ModeProblem, inner: list[InnerCost], most: int, slots: int = _SLOTS) -> None:
        self._stages, self._inner, self._problem = problem.stages, inner, problem
        self._ground = min([cost.base for cost in inner], default=0)
        self._unit = max(1, -(-max(0, most - self._ground) // slots))
        self._slots = slots
        names = [stage.name for stage in problem.stages]
        self._alone = [
            names.count(name) == 1 and cost.groups for name, cost in zip(names, inner, strict=True)
        ]
        ends = np.array([again_in(stage) for stage in self._stages])
        self._again = ends * [cost.longer for cost in inner]
        self._spared = self._again - ends
        self._inside: dict[tuple[int, int], np.ndarray] = {}
        for length in range(min(_LONGEST, len(inner))):
            for first in range(len(inner) - length):
                if self.groups(first, first + length + 1):
                    options = self._inner_options(first, first + length)
                    self._inside[first, first + length] = _least(options)
        self._rest = {len(inner): np.zeros(slots + 1)}
        for first in reversed(range(len(inner))):
            self._rest[first] = _least(self._outer_options(first))

    def least(self) -> int:
        """The least budget for which there is a choice, by these costs."""
        possible = np.flatnonzero(np.isfinite(self._rest[0]))
        if not len(possible):
            return self._ground + self._slots * self._unit
        return max(self._problem.least, self._ground + int(possible[0]) * self._unit)

    def segmented(self, segments: Sequence[tuple[int, int]]) -> Choice:
        """The choice that computes each segment of the chain again as a whole, but for the last."""
        regions = [(first, stop) for first, stop in segments[:-1] if stop - first > 1]
        alone = {first for first, stop in segments[:-1] if stop - first == 1}
        modes = ["full" if place in alone else "keep" for place in range(len(self._stages))]
        seconds = seconds_of(self._problem, modes)
        seconds += sum(
            float(self._again[first:stop].sum() - self._spared[stop - 1]) for first, stop in regions
        )
        return Choice(modes, seconds, 0, regions=regions)

    def groups(self, first: int, stop: int) -> bool:
        """Whether these blocks may form a region."""
        return all(self._alone[first:stop])

    def solve(self, budget: int) -> Choice | None:
        """The fastest choice for ``budget``."""
        slots = min(self._slots, (budget - self._ground) // self._unit)
        if budget < self._problem.least or slots < 0 or not np.isfinite(self._rest[0][slots]):
            return None
        modes = ["keep"] * len(self._stages)
        regions: list[tuple[int, int]] = []
        first, left = 0, slots
        while first < len(self._stages):
            option = _fastest(self._outer_options(first), left)
            if option.mode:
                modes[first] = option.mode
                left -= self._size(self._stages[first].costs[option.mode].kept)
                first += 1
                continue
            regions.append((first, option.stop))
            left -= self._size(self._inner[first].input)
            self._walk(first, option.stop - 1, left, modes, regions)
            first = option.stop
        seconds = self._problem.seconds + float(self._rest[0][slots])
        return Choice(modes, seconds, budget, regions=regions)

    def _walk(
        self, first: int, last: int, left: int, modes: list[str], regions: list[tuple[int, int]]
    ) -> None:
        """Write down the fastest way through a region, in which ``left`` slots are free."""
        option = _fastest(self._inner_options(first, last), left)
        if option.mode:
            if first < last:
                self._walk(first + 1, last, left - self._kept_inside(first), modes, regions)
            return
        if option.stop - first > 1:
            regions.append((first, option.stop))
            self._walk(first, option.stop - 1, left, modes, regions)
        else:
            modes[first] = "full"
        self._walk(option.stop, last, left - self._size(self._inner[option.stop].input), modes, regions)

    def _outer_options(self, first: int) -> list[_Option]:
        """The ways to go on with a block outside of all regions."""
        stage = self._stages[first]
        found = []
        for mode, cost in stage.costs.items():
            need = max(cost.forward, cost.backward, cost.kept + stage.between) - self._ground
            time = cost.seconds + times_less(self._rest[first + 1], self._size(cost.kept))
            found.append(_Option(times_from(self._size(need), time), mode))
        for stop in range(first + 2, len(self._stages) + 1):
            if (first, stop - 1) not in self._inside:
                break
            kept = self._size(self._inner[first].input)
            again = self._again[first:stop].sum()
            after = self._rest[stop]
            time = again + times_less(after, kept) + times_less(self._inside[first, stop - 1], kept)
            need = self._inner[first].input + self._first_pass(first, stop) - self._ground
            found.append(_Option(times_from(self._size(need), time), stop=stop))
        return found

    def _first_pass(self, first: int, stop: int) -> int:
        """Bytes above those kept before, when a region is computed for the first time."""
        worst = 0
        for place in range(first, stop):
            stage: ModeStage = self._stages[place]
            held = self._inner[place].input if place > first else 0
            output = self._inner[place + 1].input if place + 1 < len(self._inner) else 0
            worst = max(worst, held + stage.costs["full"].forward, output + stage.between)
        return worst

    def _inner_options(self, first: int, last: int) -> list[_Option]:
        """The ways to compute blocks ``first`` to ``last`` again, and their backward passes."""
        cost, base = self._inner[first], self._inner[last].base
        need = max(base + cost.keeping, cost.base + cost.kept - cost.input + cost.backward) - self._ground
        own = self._stages[first].costs["keep"].seconds
        if first == last:
            time = np.full(self._slots + 1, own - self._spared[last])
            return [_Option(times_from(self._size(need), time), "keep")]
        after = times_less(self._inside[first + 1, last], self._kept_inside(first))
        found = [_Option(times_from(self._size(need), own + after), "keep")]
        passing = again = 0.0
        for stop in range(first + 1, last + 1):
            one = self._inner[stop - 1]
            passing = max(passing, (one.input if stop - 1 > first else 0) + one.passing)
            again += self._again[stop - 1]
            rest = times_less(self._inside[stop, last], self._size(self._inner[stop].input))
            time = again + rest + self._inside[first, stop - 1]
            found.append(_Option(times_from(self._size(base + int(passing) - self._ground), time), stop=stop))
        return found

    def _kept_inside(self, block: int) -> int:
        """Slots of what a block in a region keeps besides its input, and of its output."""
        cost = self._inner[block]
        return self._size(cost.kept - cost.input + self._inner[block + 1].input)

    def _size(self, nbytes: int) -> int:
        return max(0, round(nbytes / self._unit))


def _least(options: list[_Option]) -> np.ndarray:
    least: np.ndarray = np.minimum.reduce([option.time for option in options])
    return least


def _fastest(options: list[_Option], slots: int) -> _Option:
    return min(options, key=lambda option: float(option.time[slots]))
