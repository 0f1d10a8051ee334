"""``Timetable``: a schedule as data, for every rank of a pipeline the list of its actions in order.

A ``Timetable`` is plain data, made by a pure function of a few numbers.  So it can be printed, tested and
priced without a process group, and every rank knows what its neighbours send it, and in which order.  One
executor (``colossalai.pipeline.executor``) runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from colossalai.pipeline.stage import Placement


class PassKind(Enum):
    """The kind of pass that a rank does with one micro-batch in one chunk."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and weights together
    INPUT_GRAD = "I"  # gradients of the inputs, which the stage before waits for
    WEIGHT_GRAD = "W"  # gradients of the weights, which no stage waits for


@dataclass(frozen=True)
class Action:
    kind: PassKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Message:
    """A nest of tensors that goes from one virtual stage to the one after it, or as a gradient to the one
    before.
    """

    source: int
    target: int
    microbatch: int

    @property
    def is_gradient(self) -> bool:
        return self.target < self.source


@dataclass(frozen=True)
class Timetable:
    """``ranks[r]`` is what rank ``r`` of the pipeline does, in order."""

    name: str
    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of the inputs."""
        return any(action.kind is PassKind.WEIGHT_GRAD for row in self.ranks for action in row)

    def forward_only(self, microbatches: int) -> Timetable:
        """Forward passes of any number of micro-batches on the same stages, one chunk after the other."""
        order = ((i, c) for c in range(self.placement.chunks) for i in range(microbatches))
        row = tuple(Action(PassKind.FORWARD, i, c) for i, c in order)
        return Timetable("forward only", self.placement, microbatches, (row,) * self.placement.ranks)

    def needs(self, rank: int, action: Action) -> Message | None:
        """What ``action`` on ``rank`` waits for from another virtual stage."""
        stage = self.placement.stage(rank, action.chunk)
        if action.kind is PassKind.FORWARD and stage > 0:
            return Message(stage - 1, stage, action.microbatch)
        if action.kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD) and stage < self.placement.last:
            return Message(stage + 1, stage, action.microbatch)
        return None

    def makes(self, rank: int, action: Action) -> Message | None:
        """What ``action`` on ``rank`` produces for another virtual stage."""
        stage = self.placement.stage(rank, action.chunk)
        if action.kind is PassKind.FORWARD and stage < self.placement.last:
            return Message(stage, stage + 1, action.microbatch)
        if action.kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD) and stage > 0:
            return Message(stage, stage - 1, action.microbatch)
        return None

    def sent(self, source: int, target: int) -> Iterator[Message]:
        """The messages from one rank to another, in the order in which they are sent."""
        for action in self.ranks[source]:
            message = self.makes(source, action)
            if message is not None and self.placement.rank(message.target) == target:
                yield message

    def peak_stored(self, rank: int) -> int:
        """The most forward passes whose activations ``rank`` keeps at one time for their backward passes.

        A chunk counts as one, however many layers it has.
        """
        stored = peak = 0
        for action in self.ranks[rank]:
            if action.kind is PassKind.FORWARD:
                stored += 1
                peak = max(peak, stored)
            elif action.kind in (PassKind.BACKWARD, PassKind.WEIGHT_GRAD):
                stored -= 1
        return peak

    def __str__(self) -> str:
        rows = (f"rank {r}: {' '.join(map(str, row))}" for r, row in enumerate(self.ranks))
        return "\n".join((f"{self.name}, {self.microbatches} micro-batches", *rows))


# What an action costs, in any unit; a backward pass is usually taken for two forward passes.
Costs = Mapping[PassKind, float]
UNIT: Costs = {
    PassKind.FORWARD: 1.0,
    PassKind.BACKWARD: 2.0,
    PassKind.INPUT_GRAD: 1.0,
    PassKind.WEIGHT_GRAD: 1.0,
}


Span = tuple[Action, float, float]


@dataclass(frozen=True)
class RunTimes:
    """The start and end of every action of a step on each rank, as planned by ``price`` or as measured."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        return min(row[0][1] for row in self.spans if row)

    @property
    def makespan(self) -> float:
        """How long the step takes, from the first start on any rank to the last end on any."""
        return max(row[-1][2] for row in self.spans if row) - self.start

    def busy(self, rank: int) -> float:
        return sum(end - start for _, start, end in self.spans[rank])

    def idle(self, rank: int) -> float:
        """How long ``rank`` waits, from the start of the step to its end."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is spent waiting."""
        ranks = range(len(self.spans))
        return sum(map(self.idle, ranks)) / (self.makespan * len(self.spans))

    def costs(self) -> Costs:
        """The mean time of each kind of action over all ranks."""
        times: dict[PassKind, list[float]] = {}
        for action, start, end in (span for row in self.spans for span in row):
            times.setdefault(action.kind, []).append(end - start)
        return {kind: sum(found) / len(found) for kind, found in times.items()}


def price(timetable: Timetable, costs: Costs = UNIT, message: float = 0.0) -> RunTimes:
    """Play ``timetable`` as if each action took what it costs; raises if it would never end.

    Args:
        message: how long a message takes to reach another rank.
    """
    ranks = range(timetable.placement.ranks)
    done: dict[Message, float] = {}
    clock, place = [0.0 for _ in ranks], [0 for _ in ranks]
    spans: list[list[Span]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for r in ranks:
            while place[r] < len(timetable.ranks[r]):
                action = timetable.ranks[r][place[r]]
                needed = timetable.needs(r, action)
                if needed is not None and needed not in done:
                    break
                start = clock[r]
                if needed is not None:
                    far = timetable.placement.rank(needed.source) != r
                    start = max(start, done[needed] + (message if far else 0.0))
                clock[r] = start + costs[action.kind]
                spans[r].append((action, start, clock[r]))
                if (made := timetable.makes(r, action)) is not None:
                    done[made] = clock[r]
                place[r] += 1
                moved = True
    _check_finished(timetable, place)
    return RunTimes(tuple(tuple(row) for row in spans))


def _check_finished(timetable: Timetable, place: Sequence[int]) -> None:
    waiting = [
        f"rank {r} waits before {timetable.ranks[r][at]}"
        for r, at in enumerate(place)
        if at < len(timetable.ranks[r])
    ]
    if waiting:
        raise ValueError(f"the schedule {timetable.name} never ends: {', '.join(waiting)}")


# Functions of (ranks, micro-batches, chunks).
Maker = Callable[[int, int, int], Timetable]
# The bubble if every rank has the same work and the costs are ``UNIT``; None where there is no formula.
Formula = Callable[[int, int, int], float | None]
