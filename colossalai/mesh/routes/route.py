"""``route``: which collectives, in which order, bring a tensor from one layout to another."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from colossalai.mesh.layout import Layout
from colossalai.mesh.mesh import Axes
from colossalai.mesh.routes.cheapest import cheapest_steps
from colossalai.mesh.routes.cost import Prices
from colossalai.mesh.routes.steps import RouteStep, with_blocks

_ALLOWED = {"S>S", "S>R", "S>I", "P>S", "P>I", "P>R", "P>P", "I>R", "I>S", "I>I", "R>R"}


@lru_cache(maxsize=4096)
def route(src: Layout, dst: Layout, prices: Prices | None = None) -> tuple[RouteStep, ...]:
    """The collectives that bring a tensor from ``src`` to ``dst``; needs no process group.

    Without ``prices`` the steps follow a fixed rule, cheapest kind first; with prices no other sequence of
    steps costs less.
    """
    if len(src.dims) == len(dst.dims) and (apart := _blocks_apart(src, dst)) is not None:
        return _with_common_blocks(src, dst, apart, prices)
    _check(src, dst)
    if prices is not None:
        return cheapest_steps(src, dst, prices)
    if other_order := [d for d in range(len(src.dims)) if _reordered(src, dst, d)]:
        # the same axis deals the same dim in another order: by way of the whole dim
        dims = tuple(() if d in other_order else axes for d, axes in enumerate(src.dims))
        between = replace(src, dims=dims, zigzag=frozenset(a for axes in dims for a in axes) & src.zigzag)
        return route(src, between) + route(between, dst)
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
        steps.append(with_blocks(step, src, dst))


def _blocks_apart(src: Layout, dst: Layout) -> list[int] | None:
    """The dims that both ends cut, in other blocks; None if no dim has other blocks here than there."""
    one = (1,) * len(src.dims)
    here, there = src.fused or one, dst.fused or one
    if here == there:
        return None
    return [d for d in range(len(one)) if here[d] != there[d] and src.dims[d] and dst.dims[d]]


def _with_common_blocks(
    src: Layout, dst: Layout, apart: list[int], prices: Prices | None
) -> tuple[RouteStep, ...]:
    """Blocks matter only where a dim is cut: so those of the end that cuts it count; a dim that both ends cut
    in other blocks is whole in between.
    """
    if apart:
        dims = tuple(() if d in apart else axes for d, axes in enumerate(src.dims))
        between = replace(src, dims=dims, zigzag=frozenset(a for axes in dims for a in axes) & src.zigzag)
        return route(src, between, prices) + route(between, dst, prices)
    one = (1,) * len(src.dims)
    fused = tuple(
        n if cut else m for n, m, cut in zip(src.fused or one, dst.fused or one, src.dims, strict=True)
    )
    return route(replace(src, fused=fused), replace(dst, fused=fused), prices)


def _reordered(src: Layout, dst: Layout, dim: int) -> bool:
    return any((a in src.zigzag) != (a in dst.zigzag) for a in {*src.dims[dim]} & {*dst.dims[dim]})


def _check(src: Layout, dst: Layout) -> None:
    if len(src.dims) != len(dst.dims):
        raise ValueError(
            f"cannot move a tensor of {len(src.dims)} dims, {src}, to a layout of {len(dst.dims)}, {dst}"
        )
    if not (src.partial or src.spread or dst.partial or dst.spread):
        return  # a cut, or none, can become any other
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
