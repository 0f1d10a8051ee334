"""GPipe: all forward passes, then all backward passes.  Simple, and every activation is stored."""

from __future__ import annotations

from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.stage import Placement


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """Every rank stores all micro-batches of all its chunks."""
    forward = [Action(PassKind.FORWARD, i, c) for c in range(chunks) for i in range(microbatches)]
    backward = [Action(PassKind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in range(microbatches)]
    row = tuple(forward + backward)
    return Timetable("gpipe", Placement(ranks, chunks), microbatches, (row,) * ranks)


def gpipe_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """In units of the work of one chunk on one micro-batch, of which every rank has ``chunks * microbatches`` to do."""
    # the pipeline fills and drains; and between chunks, a rank may wait for a micro-batch that has not come around yet
    idle = ranks - 1 + (chunks - 1) * max(ranks - microbatches, 0)
    return idle / (chunks * microbatches + idle)
