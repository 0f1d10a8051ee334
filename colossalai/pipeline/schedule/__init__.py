"""Schedules by name, each a function of (ranks, micro-batches, chunks) that gives a ``Timetable``."""

from __future__ import annotations

from colossalai.pipeline.schedule.base import UNIT, Action, Kind, Maker, Priced, Timetable, price
from colossalai.pipeline.schedule.gpipe import gpipe
from colossalai.pipeline.schedule.interleaved import interleaved
from colossalai.pipeline.schedule.one_f_one_b import one_f_one_b
from colossalai.pipeline.schedule.zero_bubble import zb_h1, zb_v

SCHEDULES: dict[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zbh1": zb_h1,
    "zbv": zb_v,
}


def make_timetable(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Timetable:
    """The timetable of the schedule ``name``; refuses numbers that do not fit."""
    if name not in SCHEDULES:
        raise ValueError(f"there is no pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}")
    for what, number in (("ranks", ranks), ("micro-batches", microbatches), ("chunks", chunks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"a pipeline schedule needs the number of {what} as a whole number of at least 1, got {number!r}"
            )
    return SCHEDULES[name](ranks, microbatches, chunks)


__all__ = [
    "SCHEDULES",
    "UNIT",
    "Action",
    "Kind",
    "Priced",
    "Timetable",
    "gpipe",
    "interleaved",
    "make_timetable",
    "one_f_one_b",
    "price",
    "zb_h1",
    "zb_v",
]
