"""The order in which a training step uses chunks, and how much memory it needs beside them; known from the first step.

A step uses chunks in an order that is the same in every step: forward, then backward.  The first step writes it down.  Later steps
follow it with a finger: what comes next can be fetched ahead, and the chunk that is needed last (Belady's choice) is the one to let go.
Where a step does something else, the finger stays where it is until the order fits again; nothing depends on it but speed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

NEVER = 1 << 60


class Trace:
    """Uses of chunks (by number) in one step."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0
        self.complete = False
        self.surprises = 0  # uses in this step that were not expected where they came
        self._places: dict[int, list[int]] = {}
        self._last_used: dict[int, int] = {}
        self._clock = 0

    def begin(self) -> None:
        """A step begins."""
        self.position = 0
        self.surprises = 0

    def visit(self, index: int) -> None:
        """Chunk ``index`` is used now."""
        if not self.complete:
            self._clock += 1
            self._last_used[index] = self._clock
            if not self.order or self.order[-1] != index:
                self.order.append(index)
            return
        if self.position and self.order[self.position - 1] == index:
            return
        place = self.next_use(index)
        if place is NEVER:
            self.surprises += 1
            return
        if place != self.position:
            self.surprises += 1
        self.position = place + 1

    def close(self) -> None:
        """The step that was written down is over."""
        self.complete = True
        self._places = {}
        for place, index in enumerate(self.order):
            self._places.setdefault(index, []).append(place)

    def next_use(self, index: int) -> int:
        """The next place in the order where ``index`` is used in this step; NEVER if there is none."""
        places = self._places.get(index, [])
        at = bisect_left(places, self.position)
        return places[at] if at < len(places) else NEVER

    def first_use(self, index: int) -> int:
        """The place of the first use in a step: updates are made in this order."""
        places = self._places.get(index)
        return places[0] if places else NEVER

    def distance(self, index: int) -> int:
        """How far away the next use is, for the choice of what to let go: in the first step, what was not used for long goes first."""
        if not self.complete:
            return -self._last_used.get(index, -1)
        return self.next_use(index)

    def ahead(self) -> Iterator[int]:
        """What comes next, in order."""
        return islice(self.order, self.position, None) if self.complete else iter(())
