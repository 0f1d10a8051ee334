"""GPipe: all forward passes, then all backward passes.  Simple, and every activation is stored."""

from __future__ import annotations

from colossalai.pipeline.schedule.base import Action, Kind, Timetable
from colossalai.pipeline.stage import Placement


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """The bubble is ``(ranks - 1) / (microbatches + ranks - 1)``; every rank stores all micro-batches."""
    forward = [Action(Kind.FORWARD, i, c) for c in range(chunks) for i in range(microbatches)]
    backward = [Action(Kind.BACKWARD, i, c) for c in reversed(range(chunks)) for i in range(microbatches)]
    row = tuple(forward + backward)
    return Timetable("gpipe", Placement(ranks, chunks), microbatches, (row,) * ranks)
