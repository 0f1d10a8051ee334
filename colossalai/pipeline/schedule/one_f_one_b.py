"""The schedules without split backward passes: GPipe, 1F1B, and 1F1B interleaved over several chunks of each
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.stage import Placement

# ---- GPipe: all forward passes, then all backward passes. Simple, and every activation is stored ----


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """Every rank stores all micro-batches of all its chunks."""
    forward = [Action(PassKind.FORWARD, i, c) for c in range(chunks) for i in range(microbatches)]
    backward = [Action(PassKind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in range(microbatches)]
    row = tuple(forward + backward)
    return Timetable("gpipe", Placement(ranks, chunks), microbatches, (row,) * ranks)


def gpipe_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """In units of the work of one chunk on one micro-batch, of which every rank has ``chunks * microbatches``
    to do.
    """
    # the pipeline fills and drains; and between chunks, a rank may wait for a micro-batch that has not come
    # around yet
    idle = ranks - 1 + (chunks - 1) * max(ranks - microbatches, 0)
    return idle / (chunks * microbatches + idle)


# 1F1B: a rank fills the ranks after it with forward passes, then does one backward pass for each forward
# pass.


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """As long as GPipe, but rank r stores no more than ``ranks - r`` micro-batches."""
    if chunks != 1:
        raise ValueError(
            f"the schedule 1f1b has one chunk for each rank, got {chunks}; use the schedule 'interleaved'"
        )
    rows = []
    for rank in range(ranks):
        forward = [Action(PassKind.FORWARD, i) for i in range(microbatches)]
        backward = [Action(PassKind.BACKWARD, i) for i in range(microbatches)]
        rows.append(alternate(forward, backward, warmup=ranks - rank - 1))
    return Timetable("1f1b", Placement(ranks), microbatches, tuple(rows))


def one_f_one_b_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """The pipeline fills and drains once, in ``ranks - 1`` steps."""
    return (ranks - 1) / (microbatches + ranks - 1)


def alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """``warmup`` forward passes, then one forward and one backward pass in turn, then what is left."""
    warmup = min(warmup, len(forward))
    row = list(forward[:warmup])
    for ahead, action in zip(forward[warmup:], backward, strict=False):
        row += [ahead, action]
    return (*row, *backward[len(forward) - warmup :])


# ---- Interleaved 1F1B: every rank holds several chunks, so the pipeline fills and drains in smaller steps
# ----


def interleaved(ranks: int, microbatches: int, chunks: int) -> Timetable:
    """Micro-batches go through the chunks in groups of ``ranks``."""
    if microbatches % ranks:
        raise ValueError(
            f"the interleaved schedule needs a number of micro-batches that is a multiple of the {ranks}"
            f" pipeline stages, got {microbatches}; change NUM_MICRO_BATCHES"
        )
    order = [
        (g * ranks + i, c) for g in range(microbatches // ranks) for c in range(chunks) for i in range(ranks)
    ]
    forward = [Action(PassKind.FORWARD, i, c) for i, c in order]
    backward = [Action(PassKind.BACKWARD, i, chunks - 1 - c) for i, c in order]
    rows = tuple(
        alternate(forward, backward, warmup=_warmup(ranks, rank, chunks, len(order))) for rank in range(ranks)
    )
    return Timetable("interleaved", Placement(ranks, chunks), microbatches, rows)


def interleaved_bubble(ranks: int, microbatches: int, chunks: int) -> float:
    """The time to fill and drain is that of 1F1B divided by the number of chunks."""
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def _warmup(ranks: int, rank: int, chunks: int, total: int) -> int:
    if chunks == 1:
        return ranks - rank - 1
    # the first gradient comes back after the group has gone through all chunks; both ways to it cost one step
    # per rank
    return min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
