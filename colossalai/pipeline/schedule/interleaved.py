"""Interleaved 1F1B: every rank holds several chunks, so the pipeline fills and drains in smaller steps."""

from __future__ import annotations

from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.schedule.one_f_one_b import alternate
from colossalai.pipeline.stage import Placement


def interleaved(ranks: int, microbatches: int, chunks: int) -> Timetable:
    """Micro-batches go through the chunks in groups of ``ranks``."""
    if microbatches % ranks:
        raise ValueError(
            f"the interleaved schedule needs a number of micro-batches that is a multiple of the {ranks} pipeline"
            f" stages, got {microbatches}; change NUM_MICRO_BATCHES"
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
    # the first gradient comes back after the group has gone through all chunks; both ways to it cost one step per rank
    return min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
