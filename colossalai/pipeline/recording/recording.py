"""What ranks noted, put together: steps, each with the pipelines that ran side by side in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colossalai.pipeline.recording.picture import draw
from colossalai.pipeline.recording.summary import summarize
from colossalai.pipeline.recording.trace import write_trace
from colossalai.pipeline.schedule import UNIT, Costs, RunTimes, Span, Timetable, price


@dataclass(frozen=True)
class Note:
    """What one rank did in one step."""

    timetable: Timetable
    pipeline: str  # the coordinates that its pipeline does not run through, such as "dp 0, tp 1"
    rank: int  # its place in this pipeline
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One step of all pipelines of a job: ``pipelines`` by the coordinates of the other axes, such as ``"dp 0, tp 1"``."""

    timetable: Timetable
    pipelines: dict[str, RunTimes]


class Recording:
    """Steps of a pipeline, as ``record_run`` saw them or ``planned_run`` plans them.

    ``step`` is the index of one of ``steps``; the default is the last, as the first ones warm up.  Ranks other than the first hold
    no steps, and their calls do nothing.
    """

    def __init__(self, steps: Sequence[RecordedStep] = (), *, unit: str = "s") -> None:
        self.steps = list(steps)
        self.unit = unit
        self._is_read = bool(steps)

    def read(self, notes: Sequence[Sequence[Note]]) -> None:
        """Take the notes of all ranks."""
        self.steps = [_step(ranks) for ranks in zip(*notes, strict=True)]
        self._is_read = True

    def picture(self, path: str | Path, *, step: int = -1, pipeline: str | None = None) -> None:
        """Draw one row for each rank of a pipeline, or of all, to a file whose name ends in .png, .svg or .pdf."""
        chosen = self._chosen(step)
        if chosen is not None:
            draw(path, [(chosen.timetable, *item) for item in _of(chosen, pipeline).items()], self.unit)

    def trace(self, path: str | Path) -> None:
        """Write all steps as JSON that https://ui.perfetto.dev and chrome://tracing open."""
        if self._chosen(-1) is not None:
            write_trace(path, [(step.timetable, step.pipelines) for step in self.steps], self.unit)

    def summary(self, *, step: int = -1, pipeline: str | None = None) -> str:
        """Busy and idle times of every rank, and the bubble beside what theory says; empty on ranks other than the first."""
        chosen = self._chosen(step)
        return "" if chosen is None else summarize(chosen.timetable, _of(chosen, pipeline), self.unit)

    def _chosen(self, step: int) -> RecordedStep | None:
        if not self._is_read:
            raise RuntimeError(
                "a recording can be read once its block, with record_run() as recording, has ended"
            )
        if not self.steps:
            return None
        if not -len(self.steps) <= step < len(self.steps):
            raise ValueError(f"the recording has the steps 0 to {len(self.steps) - 1}, got {step}")
        return self.steps[step]


def planned_run(timetable: Timetable, costs: Costs = UNIT, *, message: float = 0.0) -> Recording:
    """What a step would be if actions took what they cost (any unit) and messages took ``message``; needs no job."""
    return Recording([RecordedStep(timetable, {"": price(timetable, costs, message)})], unit="")


def _step(notes: Sequence[Note]) -> RecordedStep:
    """One step, from the notes of all ranks."""
    timetable = notes[0].timetable
    rows: dict[str, dict[int, tuple[Span, ...]]] = {}
    for note in notes:
        rows.setdefault(note.pipeline, {})[note.rank] = note.spans
    ranks = range(timetable.placement.ranks)
    return RecordedStep(
        timetable, {name: RunTimes(tuple(found[r] for r in ranks)) for name, found in rows.items()}
    )


def _of(step: RecordedStep, pipeline: str | None) -> dict[str, RunTimes]:
    if pipeline is None:
        return step.pipelines
    if pipeline not in step.pipelines:
        names = ", ".join(map(repr, step.pipelines))
        raise ValueError(f"there is no pipeline {pipeline!r} in this step; there are {names}")
    return {pipeline: step.pipelines[pipeline]}
