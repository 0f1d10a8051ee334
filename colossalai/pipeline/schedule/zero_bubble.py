"""Zero-bubble schedules: a backward pass in two halves, of which only the first is waited for.

The gradients of a stage's inputs go to the stage before it; the gradients of its weights are wanted at the
end of the step only, so they fill the times in which a rank would wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from colossalai.pipeline.schedule.base import UNIT, Action, Message, PassKind, Timetable, price
from colossalai.pipeline.schedule.one_f_one_b import alternate
from colossalai.pipeline.stage import Placement, Shape


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """1F1B with its weight gradients later by one micro-batch for each rank before.

    Every rank stores what the first rank of 1F1B does, ``ranks`` micro-batches, for a third of its bubble.
    """
    if chunks != 1:
        raise ValueError(
            f"the schedule zbh1 has one chunk for each rank, got {chunks}; use the schedule 'zbv'"
        )
    rows = []
    for rank in range(ranks):
        forward = [Action(PassKind.FORWARD, i) for i in range(microbatches)]
        backward = [Action(PassKind.INPUT_GRAD, i) for i in range(microbatches)]
        row: list[Action] = []
        for action in alternate(forward, backward, warmup=ranks - rank - 1):
            row.append(action)
            if action.kind is PassKind.INPUT_GRAD and action.microbatch >= rank:
                row.append(Action(PassKind.WEIGHT_GRAD, action.microbatch - rank))
        late = range(max(microbatches - rank, 0), microbatches)
        rows.append((*row, *(Action(PassKind.WEIGHT_GRAD, i) for i in late)))
    return Timetable("zbh1", Placement(ranks), microbatches, tuple(rows))


def zb_h1_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """In units of a forward pass: with fewer micro-batches than ranks, there is less to fill the times of
    waiting with.
    """
    idle = ranks - 1 + max(ranks - microbatches, 0)
    return idle / (3 * microbatches + idle) if ranks > 1 else 0.0


def zb_v(ranks: int, microbatches: int, chunks: int = 2) -> Timetable:
    """Two chunks on each rank, in the shape of a V: the first rank holds the first and the last layers.

    Stores as much as 1F1B (``2 * ranks`` passes of half the size) and waits for half as long as ZB-H1: all
    that is left is the way of the first micro-batch to the last rank.  With few micro-batches the fixed
    pattern would leave gaps; then the lists may come from playing the step in units of time, in which every
    rank does the most urgent thing that is ready: an input gradient, else a forward pass if that leaves it
    within the limit of stored passes, else a weight gradient.
    """
    if chunks != 2:
        raise ValueError(f"the schedule zbv has two chunks for each rank, got {chunks}; set NUM_CHUNKS to 2")
    place = Placement(ranks, 2, Shape.VEE)
    rows = tuple(_pattern(ranks, rank, microbatches) for rank in range(ranks))
    tables = [Timetable("zbv", place, microbatches, rows)]
    tables += [_play("zbv", place, microbatches, 2 * ranks, order) for order in (_by_chunk(1), _by_chunk(-1))]
    return min(tables, key=lambda table: price(table).makespan)


def zb_v_bubble(ranks: int, microbatches: int, chunks: int = 2) -> float | None:
    """In units of a forward pass of one chunk."""
    if microbatches < 2 * ranks - 1:
        return None
    return (ranks - 1) / (6 * microbatches + ranks - 1)


def _pattern(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    """What ``rank`` does: fill both legs of the V, then both chunks in turn, then the gradients that are
    left.

    The pattern is one of at least ``2 * ranks - 1`` micro-batches, of which those that do not exist are left
    out.
    """
    after, total = ranks - rank, max(microbatches, 2 * ranks - 1)
    words = ["F0"] * (2 * after - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * after
    words += ["F0", "I0", "W0", "F1", "I1", "W1"] * (total - words.count("F0"))
    words += ["I0", "W0", "F1", "I1", "W1"] * (words.count("F0") - words.count("F1"))
    words += ["I0", "I1"] * rank + ["I0", "W0"] * after
    words += ["W1"] * (total - words.count("W1")) + ["W0"] * (total - words.count("W0"))
    done: Counter[str] = Counter()
    row = []
    for word in words:
        row.append(Action(PassKind(word[0]), done[word], int(word[1])))
        done[word] += 1
    return tuple(action for action in row if action.microbatch < microbatches)


Order = Callable[[Action], tuple[int, ...]]


def _by_chunk(sign: int) -> Order:
    return lambda action: (sign * action.chunk, action.microbatch)


def _play(name: str, place: Placement, microbatches: int, limit: int, order: Order) -> Timetable:
    """Play the step with at most ``limit`` stored passes on each rank; of equal urgency, the smallest by
    ``order``.
    """
    empty = Timetable(name, place, microbatches, ((),) * place.ranks)
    total = 3 * microbatches * place.chunks
    rows: list[list[Action]] = [[] for _ in range(place.ranks)]
    players = [_Rank(empty, rank, limit, order) for rank in range(place.ranks)]
    sent: set[Message] = set()
    while any(len(row) < total for row in rows):
        made = []
        for row, player in zip(rows, players, strict=True):
            if (action := player.choose(sent)) is not None:
                row.append(action)
                player.do(action)
                made.append(empty.makes(player.rank, action))
        sent.update(message for message in made if message is not None)
    return Timetable(name, place, microbatches, tuple(map(tuple, rows)))


class _Rank:
    """The remaining work of a rank: for each chunk, the next micro-batch of every kind."""

    def __init__(self, table: Timetable, rank: int, limit: int, order: Order) -> None:
        self.table, self.rank, self.limit, self.order = table, rank, limit, order
        self.chunks = range(table.placement.chunks)
        self.next = {(kind, chunk): 0 for kind in UNIT for chunk in self.chunks}

    def choose(self, sent: set[Message]) -> Action | None:
        for kind in (PassKind.INPUT_GRAD, PassKind.FORWARD, PassKind.WEIGHT_GRAD):
            ready = [a for c in self.chunks if self.is_ready(a := Action(kind, self.next[kind, c], c), sent)]
            if ready:
                return min(ready, key=self.order)
        return None

    def is_ready(self, action: Action, sent: set[Message]) -> bool:
        if action.microbatch >= self.table.microbatches:
            return False
        needed = self.table.needs(self.rank, action)
        if needed is not None and needed not in sent:
            return False
        if action.kind is PassKind.FORWARD:
            return self._has_room(action.chunk)
        before = PassKind.FORWARD if action.kind is PassKind.INPUT_GRAD else PassKind.INPUT_GRAD
        return action.microbatch < self.next[before, action.chunk]

    def _has_room(self, chunk: int) -> bool:
        stored = sum(self.next[PassKind.FORWARD, c] - self.next[PassKind.WEIGHT_GRAD, c] for c in self.chunks)
        # the last place is for a later chunk: if the first one took it, nothing could ever be finished
        return stored + (len(self.chunks) - 1 - chunk) < self.limit

    def do(self, action: Action) -> None:
        self.next[action.kind, action.chunk] += 1
