"""1F1B: a rank fills the ranks after it with forward passes, then does one backward pass for each forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.stage import Placement


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
