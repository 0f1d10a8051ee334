"""A step as a picture: a row for each rank, a bar for each action, coloured by its kind and numbered by its micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossalai.pipeline.recording.summary import SCALES, bubbles, title
from colossalai.pipeline.recording.trace import WORDS
from colossalai.pipeline.schedule.base import PassKind, RunTimes, Timetable

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
            "a picture of a pipeline needs matplotlib, which is not installed; pip install matplotlib, or use trace(path)"
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
