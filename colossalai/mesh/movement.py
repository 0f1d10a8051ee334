"""Moving a tensor from one layout to another: the only differentiable communication in the library.

``move`` is linear, and the transpose of "from A to B" is "from dual(B) to dual(A)", so no other backward rule
is needed anywhere:

==========  ===========  ================  =======================
name        change       forward           backward
==========  ===========  ================  =======================
gather      S -> R       all-gather        reduce-scatter (P -> S)
scatter     P -> S       reduce-scatter    all-gather (S -> R)
spread      I -> R       nothing           all-reduce (P -> I)
reduce      P -> I       all-reduce        nothing (I -> R)
split       I -> S       slice             all-gather (S -> I)
collect     S -> I       all-gather        slice (I -> S)
total       P -> R       all-reduce        all-reduce (P -> R)
all_to_all  S(d) -> S(e) all-to-all        all-to-all
==========  ===========  ================  =======================

R -> I is refused: it would claim that ranks which go on to do different things do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

import colossalai.mesh.collectives as collectives
from colossalai.mesh._compat import plain_torch
from colossalai.mesh.layout import Layout, local_range
from colossalai.mesh.mesh import Axes, Mesh

_ALLOWED = {"S>S", "S>R", "S>I", "P>S", "P>I", "P>R", "P>P", "I>R", "I>S", "I>I", "R>R"}


@dataclass(frozen=True)
class RouteStep:
    """One primitive of a route.  ``before`` are the axes that cut ``dim`` outside this one."""

    do: Literal["all_gather", "reduce_scatter", "cut", "all_reduce", "all_to_all"]
    axis: str
    dim: int = -1
    before: Axes = ()
    to_dim: int = -1  # all_to_all only: the dim that is cut instead


@lru_cache(maxsize=4096)
def route(src: Layout, dst: Layout) -> tuple[RouteStep, ...]:
    """The collectives that bring a tensor from ``src`` to ``dst``, cheapest kind first; needs no process
    group.
    """
    _check(src, dst)
    have = [list(axes) for axes in src.dims]
    partial = set(src.partial - dst.partial)
    steps: list[RouteStep] = []
    while True:
        if step := _exchange(have, dst):
            have[step.dim].pop()
            have[step.to_dim].append(step.axis)
        elif step := _narrow(have, dst, partial):
            have[step.dim].append(step.axis)
            partial.discard(step.axis)
        elif late := sorted(partial - set(dst.sharded)):
            step = RouteStep("all_reduce", late[0])  # before any gather makes the tensor larger
            partial.discard(step.axis)
        elif step := _widen(have, dst):
            have[step.dim].pop()
        else:
            return tuple(steps)
        steps.append(step)


def _check(src: Layout, dst: Layout) -> None:
    if len(src.dims) != len(dst.dims):
        raise ValueError(
            f"cannot move a tensor of {len(src.dims)} dims, {src}, to a layout of {len(dst.dims)}, {dst}"
        )
    if any(src.blocks(d) != dst.blocks(d) for d in range(len(src.dims))):
        raise ValueError(f"cannot move {src} to {dst}: the fused blocks differ")
    for axis in sorted({*src.sharded, *src.partial, *src.spread, *dst.sharded, *dst.partial, *dst.spread}):
        a, b = src.state(axis), dst.state(axis)
        change = f"{'S' if isinstance(a, int) else a}>{'S' if isinstance(b, int) else b}"
        if change not in _ALLOWED:
            raise ValueError(
                f"axis {axis!r} cannot go from state {change[0]} to {change[2]} ({src} to {dst}); "
                "R and P are ended by a sum: R only by the backward pass, P by moving to I, R or a cut"
            )


def _is_prefix(have: list[str], want: Axes) -> bool:
    return len(have) < len(want) and tuple(have) == want[: len(have)]


def _exchange(have: list[list[str]], dst: Layout) -> RouteStep | None:
    """An axis that is the innermost cut of one dim and the next one wanted by another."""
    for dim, axes in enumerate(have):
        if not axes or tuple(axes) == dst.dims[dim][: len(axes)]:
            continue
        for to_dim, want in enumerate(dst.dims):
            if to_dim != dim and _is_prefix(have[to_dim], want) and want[len(have[to_dim])] == axes[-1]:
                return RouteStep("all_to_all", axes[-1], dim, tuple(axes[:-1]), to_dim)
    return None


def _narrow(have: list[list[str]], dst: Layout, partial: set[str]) -> RouteStep | None:
    """The next wanted cut of a dim whose present cuts all stay."""
    cutting = {a for axes in have for a in axes}
    for dim, want in enumerate(dst.dims):
        if _is_prefix(have[dim], want) and (axis := want[len(have[dim])]) not in cutting:
            return RouteStep("reduce_scatter" if axis in partial else "cut", axis, dim, tuple(have[dim]))
    return None


def _widen(have: list[list[str]], dst: Layout) -> RouteStep | None:
    """The innermost cut of a dim that has to go."""
    for dim, axes in enumerate(have):
        if axes and tuple(axes) != dst.dims[dim][: len(axes)]:
            return RouteStep("all_gather", axes[-1], dim, tuple(axes[:-1]))
    return None


def move(x: Tensor, src: Layout, dst: Layout, mesh: Mesh, shape: tuple[int, ...] | None = None) -> Tensor:
    """Bring ``x`` from ``src`` to ``dst`` without autograd.

    ``shape`` is the shape of the whole tensor; it is needed only where pieces differ in length.
    """
    if x.ndim != len(src.dims):
        raise ValueError(
            f"the layout {src} describes {len(src.dims)} dims, the tensor has shape {tuple(x.shape)}"
        )
    if has_torch_function_unary(x):
        # a ColoTensor computes with the whole tensor; what moves is the piece that it holds
        with plain_torch():
            x = x.as_subclass(Tensor)
    for step in route(src, dst):
        x = _apply(x, step, src, mesh, shape)
    return x


def start_move(
    x: Tensor, src: Layout, dst: Layout, mesh: Mesh, shape: tuple[int, ...] | None = None
) -> collectives.Pending:
    """``move`` whose first collective runs while the caller does something else; a partial ``x`` is used
    up.
    """
    steps = route(src, dst)
    if not steps:
        return lambda: x
    first = steps[0]
    fused = first.do != "all_reduce" and src.blocks(first.dim) > 1
    if fused or shape is not None or first.do not in ("all_reduce", "reduce_scatter", "all_gather"):
        return lambda: move(x, src, dst, mesh, shape)
    if first.do == "all_reduce":
        pending = collectives.start_all_reduce(x, mesh, first.axis)
    elif first.do == "reduce_scatter":
        pending = collectives.start_reduce_scatter(x, mesh, first.axis, first.dim)
    else:
        pending = collectives.start_all_gather(x, mesh, first.axis, first.dim)

    def finish() -> Tensor:
        moved = pending()
        for step in steps[1:]:
            moved = _apply(moved, step, src, mesh, shape)
        return moved

    return finish


def _apply(x: Tensor, step: RouteStep, layout: Layout, mesh: Mesh, shape: tuple[int, ...] | None) -> Tensor:
    if step.do == "all_reduce":
        return collectives.all_reduce(x, mesh, step.axis)
    uneven, length = shape is not None, None
    if shape is not None:
        size = shape[step.dim] // layout.blocks(step.dim)
        length = local_range(size, step.before, mesh, uneven=True)[1]
    # A fused dim is seen as (blocks, rest): the cut goes through every block.
    for dim in reversed(range(x.ndim)):
        if layout.blocks(dim) > 1 and dim in (step.dim, step.to_dim):
            x = x.unflatten(dim, (layout.blocks(dim), -1))
    places = {
        d: d + sum(layout.blocks(e) > 1 for e in (step.dim, step.to_dim) if 0 <= e <= d)
        for d in (step.dim, step.to_dim)
    }
    dim = places[step.dim]
    if step.do == "all_gather":
        x = collectives.all_gather(x, mesh, step.axis, dim, length)
    elif step.do == "all_to_all":
        x = collectives.all_to_all(x, mesh, step.axis, dim, places[step.to_dim], length)
    else:
        act = collectives.reduce_scatter if step.do == "reduce_scatter" else collectives.cut
        x = act(x, mesh, step.axis, dim, uneven=uneven)
    for d, place in sorted(places.items(), reverse=True):
        if d >= 0 and layout.blocks(d) > 1:
            x = x.flatten(place - 1, place)
    return x


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, src: Layout, dst: Layout, mesh: Mesh, shape: tuple[int, ...] | None
    ) -> Tensor:
        ctx.route = dst.dual(), src.dual(), mesh, shape
        moved = move(x, src, dst, mesh, shape)
        # autograd would hand out the input itself where nothing had to be moved (I -> R)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        # with create_graph=True the gradient has a gradient
        return redistribute(grad, *ctx.route), None, None, None, None


def redistribute(
    x: Tensor, src: Layout, dst: Layout, mesh: Mesh, shape: tuple[int, ...] | None = None
) -> Tensor:
    """``move`` with its gradient."""
    if src == dst:
        return x
    return _Redistribute.apply(x, src, dst, mesh, shape)


def unshard(local: Tensor, layout: Layout, mesh: Mesh, shape: tuple[int, ...] | None = None) -> Tensor:
    """The inverse of :func:`colossalai.mesh.layout.shard`, on every rank; not differentiable.

    Pieces of different lengths need ``shape``: without it the ranks would send different amounts, which
    backends answer with a crash.
    """
    return move(local.detach(), layout, layout.whole(), mesh, shape)


def _on_axis(x: Tensor, state: str, axis: str, dim: int = 0) -> Layout:
    """The layout of ``x`` when ``axis`` is the only axis there is."""
    this, nothing = frozenset({axis}), frozenset[str]()
    cut = dim % x.ndim if state == "S" else -1
    return Layout(
        tuple((axis,) if d == cut else () for d in range(x.ndim)),
        partial=this if state == "P" else nothing,
        spread=this if state == "R" else nothing,
    )


def gather(x: Tensor, axis: str, mesh: Mesh, dim: int = 0) -> Tensor:
    """S(dim) -> R: whole on every rank, each of which goes on to use it differently."""
    return redistribute(x, _on_axis(x, "S", axis, dim), _on_axis(x, "R", axis), mesh)


def scatter(x: Tensor, axis: str, mesh: Mesh, dim: int = 0) -> Tensor:
    """P -> S(dim): summed over ``axis``, each rank keeping its piece."""
    return redistribute(x, _on_axis(x, "P", axis), _on_axis(x, "S", axis, dim), mesh)


def spread(x: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """I -> R: no data moves, but the gradient will be summed over ``axis``."""
    return redistribute(x, _on_axis(x, "I", axis), _on_axis(x, "R", axis), mesh)


def reduce(x: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """P -> I: summed over ``axis``; every rank goes on to do the same with it."""
    return redistribute(x, _on_axis(x, "P", axis), _on_axis(x, "I", axis), mesh)


def split(x: Tensor, axis: str, mesh: Mesh, dim: int = 0) -> Tensor:
    """I -> S(dim): each rank keeps its piece."""
    return redistribute(x, _on_axis(x, "I", axis), _on_axis(x, "S", axis, dim), mesh)


def collect(x: Tensor, axis: str, mesh: Mesh, dim: int = 0) -> Tensor:
    """S(dim) -> I: whole on every rank, all of which go on to do the same with it."""
    return redistribute(x, _on_axis(x, "S", axis, dim), _on_axis(x, "I", axis), mesh)


def total(x: Tensor, axis: str, mesh: Mesh) -> Tensor:
    """P -> R: summed over ``axis``; each rank goes on to use the sum differently."""
    return redistribute(x, _on_axis(x, "P", axis), _on_axis(x, "R", axis), mesh)


def all_to_all(x: Tensor, axis: str, mesh: Mesh, uncut: int, cut: int) -> Tensor:
    """S(uncut) -> S(cut)."""
    return redistribute(x, _on_axis(x, "S", axis, uncut), _on_axis(x, "S", axis, cut), mesh)
