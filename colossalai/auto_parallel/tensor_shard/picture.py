"""A picture of a solution: every operation with its cut and its seconds, and what each conversion costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossalai.auto_parallel.tensor_shard.strategies.chosen import describe_flow
from colossalai.mesh import Layout

if TYPE_CHECKING:
    from colossalai.auto_parallel.tensor_shard.solution import Solution

_COLOURS = {"whole": "#c8c8c8", "first dim": "#8ecae6", "other dims": "#ffb703", "both": "#90be6d"}
_ROW = 0.28  # inches
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}


@dataclass(frozen=True)
class _Line:
    """An operation in the picture."""

    title: str
    strategy: str
    cut: str
    compute: float
    communication: float
    conversions: tuple[tuple[str, str, float], ...]
    """For each tensor that is moved: the operation that it comes from, its layouts, and seconds."""
    again: bool


def draw_solution(solution: Solution, path: str | Path) -> None:
    """Write a picture of a solution to a file (PNG, SVG or PDF, by its name).

    Operations that take no time and move nothing (views) are left out.
    """
    try:
        from matplotlib.figure import Figure  # heavy, and only pictures need it
    except ImportError:
        raise ImportError(
            "a picture of a solution needs matplotlib, which is not installed; "
            'pip install "colossalai[plot]", or print the solution'
        ) from None
    lines = _lines(solution)
    figure = Figure(figsize=(13, 1.6 + _ROW * len(lines)), layout="constrained")
    names, bars, moves = figure.subplots(1, 3, sharey=True, width_ratios=(3, 2, 3))
    _draw_names(names, lines)
    _draw_bars(bars, lines)
    _draw_moves(moves, lines)
    step, mesh = solution.sharded.predicted, " x ".join(map(str, solution.sharded.axes.values()))
    seconds = step.compute + step.communication
    figure.suptitle(f"mesh {mesh}: {seconds * 1e3:.4g} ms a step, {step.memory / 2**30:.3g} GiB")
    figure.savefig(path, dpi=100)


def _lines(solution: Solution) -> list[_Line]:
    problem, choice = solution.problem, solution.plan.choice
    moved: dict[int, list[tuple[str, str, float]]] = {}
    for flow, edge in zip(problem.flows, problem.solver_graph.edges, strict=True):
        seconds = float(edge.cost[choice[flow.source], choice[flow.target]])
        if seconds > 0:
            source = problem.vertices[flow.source].title
            moved.setdefault(flow.target, []).append((source, describe_flow(problem, flow, choice), seconds))
    again = {name for segment in solution.recomputed for name in segment.names}
    lines = []
    for i, (vertex, number) in enumerate(zip(problem.vertices, choice, strict=True)):
        cost, placement = vertex.costs[number], vertex.placements[number]
        if vertex.kind != "node" or (not cost.seconds and i not in moved):
            continue
        if vertex.node is not None and vertex.node.why_whole.startswith("made of"):
            continue
        lines.append(
            _Line(
                title=vertex.title,
                strategy=placement.name,
                cut=_kind(placement.outputs[0]) if placement.outputs else "whole",
                compute=cost.compute.total,
                communication=cost.communication.total,
                conversions=tuple(moved.get(i, ())),
                again=vertex.name in again,
            )
        )
    return lines


def _kind(layout: Layout) -> str:
    first, rest = bool(layout.dims and layout.dims[0]), any(layout.dims[1:])
    return "both" if first and rest else "first dim" if first else "other dims" if rest else "whole"


def _draw_names(axes: Any, lines: list[_Line]) -> None:
    from matplotlib.patches import Patch

    axes.set_xlim(0, 1)
    axes.set_ylim(len(lines), -1)
    axes.axis("off")
    axes.set_title("operation and strategy")
    for y, line in enumerate(lines):
        axes.barh(y, 1, height=0.9, color=_COLOURS[line.cut])
        text = f"{line.title}  {line.strategy}{'  (runs again)' if line.again else ''}"
        axes.text(0.01, y, text, va="center", fontsize=7)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    title = "the result is cut along"
    axes.legend(handles=handles, title=title, fontsize=7, title_fontsize=7, ncols=4, **_BELOW)


def _draw_bars(axes: Any, lines: list[_Line]) -> None:
    places = range(len(lines))
    compute = [line.compute * 1e3 for line in lines]
    axes.barh(places, compute, height=0.7, color="#577590", label="kernels")
    own = [line.communication * 1e3 for line in lines]
    axes.barh(places, own, left=compute, height=0.7, color="#f94144", label="own collectives")
    axes.set_title("ms in a step")
    axes.legend(fontsize=7, **_BELOW)
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.tick_params(axis="y", left=False, labelleft=False)


def _draw_moves(axes: Any, lines: list[_Line]) -> None:
    most = max((seconds for line in lines for *_, seconds in line.conversions), default=1.0)
    axes.set_xlim(0, 1)
    axes.axis("off")
    axes.set_title("conversions of operands")
    for y, line in enumerate(lines):
        if not line.conversions:
            continue
        total = sum(seconds for *_, seconds in line.conversions)
        axes.barh(y, min(1.0, total / most) * 0.15, height=0.7, color="#f3722c")
        text = ";  ".join(f"{s}: {way}, {seconds * 1e3:.3g} ms" for s, way, seconds in line.conversions)
        axes.text(0.17, y, text, va="center", fontsize=7)
