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

Two moves are between pieces that no layout describes: :func:`ring_shift` (backward: the shift the other way)
and :func:`all_to_all_ragged` (backward: the same with the numbers of rows exchanged).

R -> I is refused: it would claim that ranks which go on to do different things do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import has_torch_function_unary

import colossalai.mesh.collectives as collectives
from colossalai.mesh._compat import plain_torch
from colossalai.mesh.layout import Layout, check_zigzag, local_range
from colossalai.mesh.mesh import Axes, Mesh
from colossalai.mesh.routes.cost import Links, price_tensor
from colossalai.mesh.routes.route import route
from colossalai.mesh.routes.steps import RouteStep


def move(
    x: Tensor,
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    shape: tuple[int, ...] | None = None,
    links: Links | None = None,
) -> Tensor:
    """Bring ``x`` from ``src`` to ``dst`` without autograd.

    ``shape`` is the shape of the whole tensor; it is needed only where pieces differ in length.  With
    ``links``, the costs of the axes, the cheapest route is taken; every rank must pass the same.
    """
    if x.ndim != len(src.dims):
        raise ValueError(
            f"the layout {src} describes {len(src.dims)} dims, the tensor has shape {tuple(x.shape)}"
        )
    if has_torch_function_unary(x):
        # a ColoTensor computes with the whole tensor; what moves is the piece that it holds
        with plain_torch():
            x = x.as_subclass(Tensor)
    for step in _steps(x, src, dst, mesh, shape, links):
        x = _apply(x, step, mesh, shape)
    return x


def _steps(
    x: Tensor, src: Layout, dst: Layout, mesh: Mesh, shape: tuple[int, ...] | None, links: Links | None
) -> tuple[RouteStep, ...]:
    if links is None:
        return route(src, dst)
    for axis, link in links.items():
        if link.ranks != mesh.size.get(axis):
            raise ValueError(
                f"links[{axis!r}] joins {link.ranks} ranks, and the axis has {mesh.size.get(axis, 'none')}:"
                f" these are not the links of {mesh}"
            )
    if shape is None:
        shape = tuple(n * mesh.group_size(*axes) for n, axes in zip(x.shape, src.dims, strict=True))
    return route(src, dst, price_tensor(links, shape, x.element_size()))


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
    if (
        first.blocks > 1
        or shape is not None
        or first.do not in ("all_reduce", "reduce_scatter", "all_gather")
    ):
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
            moved = _apply(moved, step, mesh, shape)
        return moved

    return finish


def _apply(x: Tensor, step: RouteStep, mesh: Mesh, shape: tuple[int, ...] | None) -> Tensor:
    if step.do == "all_reduce":
        return collectives.all_reduce(x, mesh, step.axis)
    uneven, length = shape is not None, None
    if shape is not None:
        length = local_range(shape[step.dim] // step.blocks, step.before, mesh, uneven=True)[1]
    parts, blocks = mesh.size[step.axis], {step.dim: step.blocks, step.to_dim: step.to_blocks}
    if step.zigzag and step.do in ("cut", "reduce_scatter"):
        x = _second_half_reversed(x, step.dim, parts)
    if step.to_zigzag:
        x = _second_half_reversed(x, step.to_dim, parts)
    # A dim of several blocks is seen as (blocks, rest): the cut goes through every block.
    split = sorted(d for d, n in blocks.items() if n > 1)
    for dim in reversed(split):
        x = x.unflatten(dim, (blocks[dim], -1))
    places = {d: d + sum(e <= d for e in split) for d in blocks}
    dim = places[step.dim]
    if step.do == "all_gather":
        x = collectives.all_gather(x, mesh, step.axis, dim, length)
    elif step.do == "all_to_all":
        x = collectives.all_to_all(x, mesh, step.axis, dim, places[step.to_dim], length)
    else:
        act = collectives.reduce_scatter if step.do == "reduce_scatter" else collectives.cut
        x = act(x, mesh, step.axis, dim, uneven=uneven)
    for d in reversed(split):
        x = x.flatten(places[d] - 1, places[d])
    if step.zigzag and step.do in ("all_gather", "all_to_all"):
        x = _second_half_reversed(x, step.dim, parts)
    return x


def _second_half_reversed(x: Tensor, dim: int, parts: int) -> Tensor:
    """The 2 x ``parts`` chunks of a dim in the order in which ranks that come one after the other hold them,
    or from there back to their own.
    """
    if parts == 1 or x.size(dim) == 0:
        return x
    check_zigzag(dim, x.size(dim), parts)
    chunks = x.chunk(2 * parts, dim)
    return torch.cat([*chunks[:parts], *reversed(chunks[parts:])], dim)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        src: Layout,
        dst: Layout,
        mesh: Mesh,
        shape: tuple[int, ...] | None,
        links: Links | None,
    ) -> Tensor:
        ctx.route = dst.dual(), src.dual(), mesh, shape, links
        moved = move(x, src, dst, mesh, shape, links)
        # autograd would hand out the input itself where nothing had to be moved (I -> R)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        # with create_graph=True the gradient has a gradient
        return redistribute(grad, *ctx.route), None, None, None, None, None


def redistribute(
    x: Tensor,
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    shape: tuple[int, ...] | None = None,
    links: Links | None = None,
) -> Tensor:
    """``move`` with its gradient."""
    if src == dst:
        return x
    return _Redistribute.apply(x, src, dst, mesh, shape, links)


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


class _RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, mesh: Mesh, by: int) -> Tensor:
        ctx.back = axis, mesh, -by
        moved = collectives.ring_shift(x, mesh, axis, by)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ring_shift(grad, *ctx.back), None, None, None


def ring_shift(x: Tensor, axis: str, mesh: Mesh, by: int = 1) -> Tensor:
    """What the rank ``by`` places before this one on the ring of ``axis`` passed, of the same shape."""
    return _RingShift.apply(x, axis, mesh, by)


@dataclass
class _Exchange:
    """A ragged all-to-all under way, in one direction and then in the other."""

    send: tuple[int, ...]
    receive: tuple[int, ...]
    axes: Axes
    mesh: Mesh
    pending: collectives.Pending | None = None

    def start(self, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> None:
        self.pending = collectives.start_all_to_all_ragged(x, send, receive, self.mesh, self.axes)

    def end(self) -> Tensor:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending()


class _Depart(torch.autograd.Function):
    """Sends rows, and has nothing to show for it but a token, by which autograd knows who needs them.

    autograd runs the functions of a backward pass in the reverse order of the forward pass.  There the rows
    that ``_Arrive`` gave are sent, and they are waited for here: so what lies between the two overlaps with
    messages in both passes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x, exchange.send, exchange.receive)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grad, ctx.exchange.receive, ctx.exchange.send)
        return grad.new_empty(0), None


def start_exchange(
    x: Tensor, send: Sequence[int], receive: Sequence[int], axes: Axes, mesh: Mesh
) -> Callable[[], Tensor]:
    """Begin :func:`all_to_all_ragged`; the caller ends it by calling what this returns, once.

    In the backward pass the way back overlaps in the same way.
    """
    exchange = _Exchange(tuple(send), tuple(receive), axes, mesh)
    token = _Depart.apply(x, exchange)
    return lambda: _Arrive.apply(token, exchange)


def all_to_all_ragged(
    x: Tensor, send: Sequence[int], receive: Sequence[int], axes: str | Axes, mesh: Mesh
) -> Tensor:
    """The rows that the ranks of ``axes`` (one, or several joined) have for this one, in their order; ``x``
    holds ``send[i]`` rows (along dim 0) for the i-th rank, which gives ``receive[i]``.
    """
    return start_exchange(x, send, receive, (axes,) if isinstance(axes, str) else axes, mesh)()
