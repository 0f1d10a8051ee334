"""``RouteStep``: one collective of a route, and all layouts that one collective leads to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from colossalai.mesh.layout import Layout
from colossalai.mesh.mesh import Axes


@dataclass(frozen=True)
class RouteStep:
    """One primitive of a route.  ``before`` are the axes that cut ``dim`` outside this one."""

    do: Literal["all_gather", "reduce_scatter", "cut", "all_reduce", "all_to_all"]
    axis: str
    dim: int = -1
    before: Axes = ()
    to_dim: int = -1  # all_to_all only: the dim that is cut instead
    blocks: int = 1
    """Into how many blocks ``dim`` falls, through each of which the cut goes."""
    to_blocks: int = 1
    zigzag: bool = False
    """Whether the second of two blocks of ``dim`` is dealt to the ranks of the axis in reverse order."""
    to_zigzag: bool = False


def with_blocks(step: RouteStep, src: Layout, dst: Layout) -> RouteStep:
    """``step`` with what it must know about the blocks of its dims."""
    if step.do == "all_reduce":
        return step
    # what is given up is cut as in src, what is taken as in dst
    here = src if step.do in ("all_gather", "all_to_all") else dst
    step = replace(step, blocks=here.blocks(step.dim), zigzag=step.axis in here.zigzag)
    if step.do != "all_to_all":
        return step
    return replace(step, to_blocks=dst.blocks(step.to_dim), to_zigzag=step.axis in dst.zigzag)


def layout_after(layout: Layout, step: RouteStep, dealt: Collection[tuple[int, str]] = frozenset()) -> Layout:
    """Where a tensor lies after ``step``; an axis that becomes the first of its dim deals it in zig-zag order
    if ``dealt`` names the two.
    """
    dims, zigzag = list(layout.dims), layout.zigzag
    if step.do in ("all_gather", "all_to_all"):
        dims[step.dim] = dims[step.dim][:-1]
        zigzag -= {step.axis}
    to_dim = step.to_dim if step.do == "all_to_all" else step.dim
    if step.do in ("cut", "reduce_scatter", "all_to_all"):
        if not dims[to_dim] and (to_dim, step.axis) in dealt:
            zigzag |= {step.axis}
        dims[to_dim] += (step.axis,)
    return replace(layout, dims=tuple(dims), partial=layout.partial - {step.axis}, zigzag=zigzag)


def one_steps(
    layout: Layout,
    axes: Collection[str],
    fits: Callable[[Layout, int], bool] = lambda layout, dim: True,
    dealt: Collection[tuple[int, str]] = frozenset(),
) -> Iterator[tuple[RouteStep, Layout]]:
    """Every step that a tensor in ``layout`` can take on one of ``axes``, with the layout that it leads to.

    ``fits(layout, dim)`` says whether the dim can be cut as in that layout; for ``dealt`` see
    :func:`layout_after`.
    """
    steps = [
        RouteStep("all_gather", cuts[-1], dim, cuts[:-1]) for dim, cuts in enumerate(layout.dims) if cuts
    ]
    steps += [
        replace(step, do="all_to_all", to_dim=to)
        for step in steps
        for to in range(len(layout.dims))
        if to != step.dim
    ]
    whole = [axis for axis in axes if axis not in layout.sharded]
    for axis in whole:
        summed = axis in layout.partial
        steps += [
            RouteStep("reduce_scatter" if summed else "cut", axis, dim, cuts)
            for dim, cuts in enumerate(layout.dims)
        ]
        if summed:
            steps.append(RouteStep("all_reduce", axis))
    for step in steps:
        after = layout_after(layout, step, dealt)
        taken = step.to_dim if step.do == "all_to_all" else step.dim
        if step.do in ("all_gather", "all_reduce") or fits(after, taken):
            yield with_blocks(step, layout, after), after
