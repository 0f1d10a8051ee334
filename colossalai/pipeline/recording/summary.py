"""A step as a table: how long every rank worked and waited, and the bubble beside its theory."""

from __future__ import annotations

from collections.abc import Mapping

from colossalai.pipeline.schedule import RunTimes, Timetable, bubble_formula, price

# How many of a unit make a second, the unit's name, and digits behind the point; "" are the units of a plan.
SCALES = {"s": (1e3, " ms", 2), "": (1.0, "", 1)}


def summarize(timetable: Timetable, pipelines: Mapping[str, RunTimes], unit: str) -> str:
    return "\n".join(
        line
        for name, played in pipelines.items()
        for line in (
            title(timetable, name),
            *_ranks(played, unit),
            f"bubble: {bubbles(timetable, played, unit)}",
        )
    )


def title(timetable: Timetable, pipeline: str = "") -> str:
    place = timetable.placement
    chunks = f" x {place.chunks} chunks" if place.chunks > 1 else ""
    where = f" ({pipeline})" if pipeline else ""
    return f"{timetable.name}, {place.ranks} ranks{chunks}, {timetable.microbatches} micro-batches{where}"


def bubbles(timetable: Timetable, played: RunTimes, unit: str) -> str:
    """The bubble as it was, by the formula of the schedule, and of the timetable with the mean costs of this
    step.
    """
    found = [f"{'measured' if unit else 'planned'} {played.bubble:.1%}"]
    if (formula := bubble_formula(timetable)) is not None:
        found.append(f"formula {formula:.1%}")
    if unit:
        found.append(f"timetable with the mean times {price(timetable, played.costs()).bubble:.1%}")
    return ", ".join(found)


def _ranks(played: RunTimes, unit: str) -> list[str]:
    scale, name, digits = SCALES[unit]
    lines = []
    for rank in range(len(played.spans)):
        busy, idle = (f"{t * scale:8.{digits}f}{name}" for t in (played.busy(rank), played.idle(rank)))
        lines.append(
            f"  rank {rank:<3} busy {busy}  idle {idle}  ({played.idle(rank) / played.makespan:.1%})"
        )
    return lines
