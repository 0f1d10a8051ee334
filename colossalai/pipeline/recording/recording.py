"""``Recording``: the steps that ranks recorded, each with the pipelines that ran side by side in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossalai.pipeline.schedule import UNIT, Costs, RunTimes, Span, Timetable, bubble_formula, price
from colossalai.pipeline.schedule.base import Action, Message, PassKind

# Steps in the trace event format of Chrome, which Perfetto opens too.
#
# A pipeline is a process of the trace, a rank of it a thread, an action a slice; arrows are the messages
# between ranks.

WORDS = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT_GRAD: "gradients of inputs",
    PassKind.WEIGHT_GRAD: "gradients of weights",
}

Steps = Sequence[tuple[Timetable, Mapping[str, RunTimes]]]


def write_trace(path: str | Path, steps: Steps, unit: str) -> None:
    """Times are in microseconds from the first start; a unit of a plan is shown as a millisecond."""
    scale = 1e6 if unit else 1e3
    start = min(played.start for _, pipelines in steps for played in pipelines.values())
    names = list(steps[0][1])
    events = [event for i, name in enumerate(names) for event in _names(i, name, steps[0][0].placement.ranks)]
    for number, (timetable, pipelines) in enumerate(steps):
        for name, played in pipelines.items():
            writer = _Writer(timetable, names.index(name), number, start, scale)
            events += writer.events(played)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(process: int, pipeline: str, ranks: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", process, 0, f"pipeline {pipeline}".strip())
    for rank in range(ranks):
        yield _name("thread_name", process, rank, f"rank {rank}")


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


class _Writer:
    def __init__(self, timetable: Timetable, process: int, step: int, start: float, scale: float) -> None:
        self.timetable, self.process, self.step = timetable, process, step
        self.start, self.scale = start, scale

    def events(self, played: RunTimes) -> Iterator[dict[str, Any]]:
        for rank, row in enumerate(played.spans):
            for action, start, end in row:
                yield self._slice(rank, action, start, end)
                if self._is_far(needed := self.timetable.needs(rank, action)):
                    # the end of an arrow is bound to the slice that begins with it
                    yield self._arrow("f", rank, needed, start) | {"bp": "e"}
                if self._is_far(made := self.timetable.makes(rank, action)):
                    yield self._arrow("s", rank, made, end)

    def _slice(self, rank: int, action: Action, start: float, end: float) -> dict[str, Any]:
        args = {
            "step": self.step,
            "micro-batch": action.microbatch,
            "chunk": action.chunk,
            "stage": self.timetable.placement.stage(rank, action.chunk),
        }
        event = self._event("X", rank, start, str(action), WORDS[action.kind])
        return event | {"dur": (end - start) * self.scale, "args": args}

    def _is_far(self, message: Message | None) -> bool:
        rank = self.timetable.placement.rank
        return message is not None and rank(message.source) != rank(message.target)

    def _arrow(self, phase: str, rank: int, message: Message | None, at: float) -> dict[str, Any]:
        assert message is not None
        number = f"{self.process}.{self.step}.{message.source}.{message.target}.{message.microbatch}"
        what = "gradient" if message.is_gradient else "activation"
        return self._event(phase, rank, at, what, "message") | {"id": number}

    def _event(self, phase: str, rank: int, at: float, name: str, category: str) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "cat": category,
            "pid": self.process,
            "tid": rank,
            "ts": (at - self.start) * self.scale,
        }


# ---- A step as a table: how long every rank worked and waited, and the bubble beside its theory ----

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


# A step as a picture: a row for each rank, a bar for each action, coloured by its kind and numbered by its
# micro-batch.

COLOURS = {
    PassKind.FORWARD: "#4c78a8",
    PassKind.BACKWARD: "#54a24b",
    PassKind.INPUT_GRAD: "#e8853a",
    PassKind.WEIGHT_GRAD: "#8f6bb3",
}


Panel = tuple[Timetable, str, RunTimes]  # with the name of the pipeline


def draw(path: str | Path, panels: Sequence[Panel], unit: str) -> None:
    """Draw ``panels`` below each other."""
    try:
        from matplotlib.figure import Figure  # heavy, and only pictures need it
    except ImportError as error:
        raise ImportError(
            "a picture of a pipeline needs matplotlib, which is not installed; pip install matplotlib, or use"
            " trace(path)"
        ) from error
    rows = sum(len(played.spans) for *_, played in panels)
    figure = Figure(figsize=(12, 0.6 + 0.7 * len(panels) + 0.4 * rows), layout="constrained")
    axes = figure.subplots(
        len(panels),
        squeeze=False,
        gridspec_kw={"height_ratios": [len(played.spans) for *_, played in panels]},
    )[:, 0]
    for axis, (timetable, name, played) in zip(axes, panels, strict=True):
        text = f"{title(timetable, name)}; bubble: {bubbles(timetable, played, unit)}"
        axis.set_title(text, fontsize=9, loc="left")
        _draw_pipeline(axis, played, SCALES[unit][0])
        axis.set_xlim(0, max(played.makespan for *_, played in panels) * SCALES[unit][0])
    axes[-1].set_xlabel(f"time{SCALES[unit][1].replace(' ', ' / ')}", fontsize=8)
    _legend(figure, {(a.kind, a.chunk) for *_, played in panels for row in played.spans for a, *_ in row})
    figure.savefig(path, dpi=100)


def _draw_pipeline(axis: Any, played: RunTimes, scale: float) -> None:
    ranks = range(len(played.spans))
    for rank in ranks:
        for action, start, end in played.spans[rank]:
            left, width = (start - played.start) * scale, (end - start) * scale
            colour = _colour(action.kind, action.chunk)
            axis.barh(rank, width, left=left, height=0.9, color=colour, edgecolor="white", linewidth=0.5)
            if end - start > played.makespan / 120:  # else the number does not fit
                axis.text(left + width / 2, rank, action.microbatch, ha="center", va="center", fontsize=7)
    axis.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks], fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _colour(kind: PassKind, chunk: int) -> tuple[float, float, float]:
    """The colour of the kind, brighter for each further chunk."""
    bright = 1 - 0.75 * 0.65**chunk
    red, green, blue = (int(COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red + (1 - red) * bright, green + (1 - green) * bright, blue + (1 - blue) * bright


def _legend(figure: Any, used: set[tuple[PassKind, int]]) -> None:
    from matplotlib.patches import Patch

    chunks = 1 + max(chunk for _, chunk in used)
    ordered = [(kind, chunk) for kind in PassKind for chunk in range(chunks) if (kind, chunk) in used]
    handles = [
        Patch(color=_colour(kind, chunk), label=WORDS[kind] + (f", chunk {chunk}" if chunks > 1 else ""))
        for kind, chunk in ordered
    ]
    figure.legend(
        handles=handles, loc="outside lower right", ncols=min(len(handles), 8), fontsize=7, frameon=False
    )


@dataclass(frozen=True)
class Note:
    """The actions of one rank in one step."""

    timetable: Timetable
    pipeline: str  # the coordinates that its pipeline does not run through, such as "dp 0, tp 1"
    rank: int  # its place in this pipeline
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RecordedStep:
    """One step of all pipelines of a job: ``pipelines`` by the coordinates of the other axes, such as ``"dp
    0, tp 1"``.
    """

    timetable: Timetable
    pipelines: dict[str, RunTimes]


class Recording:
    """Steps of a pipeline, as ``record_run`` saw them or ``planned_run`` plans them.

    ``step`` is the index of one of ``steps``; the default is the last, as the first ones warm up.  Ranks
    other than the first hold no steps, and their calls do nothing.
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
        """Draw one row for each rank of a pipeline, or of all, to a file whose name ends in .png, .svg or
        .pdf.
        """
        chosen = self._chosen(step)
        if chosen is not None:
            draw(path, [(chosen.timetable, *item) for item in _of(chosen, pipeline).items()], self.unit)

    def trace(self, path: str | Path) -> None:
        """Write all steps as JSON that https://ui.perfetto.dev and chrome://tracing open."""
        if self._chosen(-1) is not None:
            write_trace(path, [(step.timetable, step.pipelines) for step in self.steps], self.unit)

    def summary(self, *, step: int = -1, pipeline: str | None = None) -> str:
        """Busy and idle times of every rank, and the bubble beside what theory says; empty on ranks other
        than the first.
        """
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
    """What a step would be if actions took what they cost (any unit) and messages took ``message``; needs no
    job.
    """
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
