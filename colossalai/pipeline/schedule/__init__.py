"""Schedules by name, each a function of (ranks, micro-batches, chunks) that gives a ``Timetable``."""

from __future__ import annotations

from colossalai.pipeline.schedule.base import (
    UNIT,
    Action,
    Costs,
    Formula,
    Maker,
    PassKind,
    RunTimes,
    Span,
    Timetable,
    price,
)
from colossalai.pipeline.schedule.one_f_one_b import (
    gpipe,
    gpipe_bubble,
    interleaved,
    interleaved_bubble,
    one_f_one_b,
    one_f_one_b_bubble,
)
from colossalai.pipeline.schedule.zero_bubble import zb_h1, zb_h1_bubble, zb_v, zb_v_bubble

SCHEDULES: dict[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zbh1": zb_h1,
    "zbv": zb_v,
}

BUBBLES: dict[str, Formula] = {
    "gpipe": gpipe_bubble,
    "1f1b": one_f_one_b_bubble,
    "interleaved": interleaved_bubble,
    "zbh1": zb_h1_bubble,
    "zbv": zb_v_bubble,
}


def make_timetable(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """The timetable of the schedule ``name``; refuses numbers that do not fit."""
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"there is no pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro-batches", microbatches), ("chunks", chunks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"a pipeline schedule needs the number of {what} as a whole number of at least 1, got"
                f" {number!r}"
            )
    return SCHEDULES[name](ranks, microbatches, chunks)


def bubble_formula(timetable: Timetable) -> float | None:
    """The part of all ranks' time that the theory of the schedule says is spent waiting; None where it says
    nothing.
    """
    place = timetable.placement
    formula = BUBBLES.get(timetable.name)
    return None if formula is None else formula(place.ranks, timetable.microbatches, place.chunks)


__all__ = [
    "BUBBLES",
    "SCHEDULES",
    "UNIT",
    "Action",
    "Costs",
    "PassKind",
    "RunTimes",
    "Span",
    "Timetable",
    "bubble_formula",
    "gpipe",
    "interleaved",
    "make_timetable",
    "one_f_one_b",
    "price",
    "zb_h1",
    "zb_v",
]
