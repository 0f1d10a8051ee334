"""SUMMA: the product of a 2D plan, one panel at a time.

In 2D and 2.5D both operands are cut along k: x over the axis ``x_axis`` (a column of the grid each), w over
``w_axis``. Gathering them would hold a whole row of x and a whole column of w on every rank.  Instead, step t
broadcasts panel t of each, multiplies, and adds up; the next panel travels meanwhile.  Three products of this
kind are closed under transposition, so they are also each other's backward passes:

=====================  =====================================================  ==================
``ab(x, w)``           y   = sum_t x_t w_t                                    both broadcast
``abt(y, w)``          x_t = sum over ``x_axis`` of y w_t^T, kept by rank t   broadcast, reduce
``atb(x, y)``          w_t = sum over ``w_axis`` of x_t^T y, kept by rank t   broadcast, reduce
=====================  =====================================================  ==================

A linear is ``ab`` forward.  A head tied to a vocabulary table (which lies transposed) is ``abt`` forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import colossalai.mesh.collectives as collectives
from colossalai.mesh.first_order import check_first_order
from colossalai.mesh.layout import Layout, piece
from colossalai.mesh.mesh import Mesh
from colossalai.mesh.movement import move
from colossalai.mesh.products.plan import MatmulPlan, Stored


@dataclass(frozen=True)
class Panels:
    """The two axes of the grid that a product streams over."""

    x_axis: str
    w_axis: str
    tied: bool
    """The weight lies transposed: its panels are cut along n, and those of y are summed."""

    @staticmethod
    def of(plan: MatmulPlan, mesh: Mesh) -> Panels | None:
        """How ``plan`` can be streamed, or None where it cannot, or where there is only one panel."""
        if plan.x.dims[:-1] != plan.x_use.dims[:-1] or len(plan.x.dims[-1]) != 1:
            return None
        (x_axis,) = plan.x.dims[-1]
        tied = plan.roles[x_axis] == "K"
        streamed = plan.w.dims[1 if tied else 0]
        others = [a for a, r in plan.roles.items() if r != "M" and a != x_axis]
        if others or len(streamed) != 1 or plan.roles[streamed[0]] != "M":
            return None
        if tied and plan.y.dims[-1] != (x_axis,):
            return None
        size = mesh.size[x_axis]
        if size == 1 or mesh.size[streamed[0]] != size:
            return None
        return Panels(x_axis, streamed[0], tied)

    def w_layout(self, plan: MatmulPlan) -> Layout:
        """The weight's layout while it is streamed: on other row axes it is whole."""
        return _w_layout(self, plan)


@lru_cache(maxsize=1024)
def _w_layout(panels: Panels, plan: MatmulPlan) -> Layout:
    k, n = plan.w_use.dims
    dims = (k, (panels.w_axis,)) if panels.tied else ((panels.w_axis,), n)
    return replace(plan.w_use, dims=dims, spread=plan.w_use.spread - {panels.w_axis})


def stream_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: MatmulPlan,
    mesh: Mesh,
    stored: Stored,
    panels: Panels,
) -> Tensor:
    return _Summa.apply(x, w, bias, plan, mesh, stored, panels)


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        plan: MatmulPlan,
        mesh: Mesh,
        stored: Stored,
        panels: Panels,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.plan, ctx.stored, ctx.mesh, ctx.panels = plan, stored, mesh, panels
        w = move(w, stored.layout(plan.w), stored.layout(panels.w_layout(plan)), mesh, stored.shape)
        w = stored.out_in(w)
        grid = _Grid(mesh, panels, stored)
        if not panels.tied and plan.y_use == plan.y:
            return grid.ab(x, w.t(), bias)
        y = grid.abt(x, w, keep=True)() if panels.tied else grid.ab(x, w.t())
        if not panels.tied:
            y = move(y, plan.y_use, plan.y, mesh, stored.whole_y(y, plan.y_use, mesh))
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("a product")
        (x, w), plan, stored, mesh, panels = ctx.saved_tensors, ctx.plan, ctx.stored, ctx.mesh, ctx.panels
        dx: Tensor | None = None
        dw = db = None
        if ctx.needs_input_grad[2]:
            db = dy.flatten(0, -2).sum(0)
        grid, resting = _Grid(mesh, panels, stored), stored.layout(plan.w)
        streamed = stored.layout(panels.w_layout(plan))
        if not panels.tied:
            dy = move(dy, plan.y.dual(), plan.y_use.dual(), mesh, stored.whole_y(dy, plan.y, mesh))
        if ctx.needs_input_grad[0]:
            w = stored.out_in(move(w, resting, streamed, mesh, stored.shape))
            # the last sum of dx runs while the first panel of dw is computed
            finish_dx = partial(grid.ab, dy, w) if panels.tied else grid.abt(dy, w.t())
        if ctx.needs_input_grad[1]:
            # (k, n) from x and dy, or for a tied table (n, k) from dy and x
            product = grid.atb(dy, x)() if panels.tied else grid.atb(x, dy)()
            if (stored.order == "oi") != panels.tied:
                product = product.t()
            dw = move(product, streamed.dual(), resting.dual(), mesh, stored.shape)
        if ctx.needs_input_grad[0]:
            dx = finish_dx()
        return dx, dw, db, None, None, None, None


class _Grid:
    """The three products on this rank's place of the grid."""

    def __init__(self, mesh: Mesh, panels: Panels, stored: Stored) -> None:
        self.mesh, self.panels = mesh, panels
        self.count = mesh.size[panels.x_axis]
        # only a vocabulary may be cut unevenly, and only in a tied table is it the streamed dim
        n = None if stored.shape is None else stored.shape[0 if stored.order == "oi" else 1]
        self.length = n if panels.tied else None

    def ab(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` (..., k) with k over x_axis, ``w`` (k, n) with k over w_axis."""
        y: Tensor | None = None
        wide = self._broadcast(w, self.panels.w_axis, 0)
        for x_t, w_t in zip(self._broadcast(x, self.panels.x_axis, -1), wide, strict=True):
            if y is None:
                y = F.linear(x_t, w_t.t(), bias)
            else:
                # not in place: selective activation checkpointing keeps what it adds to
                y = torch.addmm(y.flatten(0, -2), x_t.flatten(0, -2), w_t).view_as(y)
        assert y is not None
        return y

    def abt(self, y: Tensor, w: Tensor, keep: bool = False) -> collectives.Pending:
        """``y`` (..., n), ``w`` (k, n) with k over w_axis; the result (..., k) has k over x_axis.

        Sums are made in the products themselves, unless these are kept, by selective activation
        checkpointing.
        """
        parts = (y @ w_t.t() for w_t in self._broadcast(w, self.panels.w_axis, 0))
        return self._reduce((t.clone() for t in parts) if keep else parts, self.panels.x_axis)

    def atb(self, x: Tensor, y: Tensor) -> collectives.Pending:
        """``x`` (..., k) with k over x_axis, ``y`` (..., n); the result (k, n) has k over w_axis."""
        rows = y.flatten(0, -2)
        parts = (x_t.flatten(0, -2).t() @ rows for x_t in self._broadcast(x, self.panels.x_axis, -1))
        return self._reduce(parts, self.panels.w_axis)

    def _broadcast(self, local: Tensor, axis: str, dim: int) -> Iterator[Tensor]:
        """The panels of all ranks of ``axis``, one after the other; the next one is under way."""

        def start(t: int) -> Callable[[], Tensor]:
            shape = list(local.shape)
            if self.length is not None:
                shape[dim] = piece(self.length, self.count, t)[1]
            return collectives.start_broadcast(local, self.mesh, axis, t, tuple(shape))

        pending = start(0)
        for t in range(self.count):
            panel = pending()
            if t + 1 < self.count:
                pending = start(t + 1)
            yield panel

    def _reduce(self, parts: Iterator[Tensor], axis: str) -> collectives.Pending:
        """The sum of part t goes to rank t of ``axis``, while part t + 1 is computed."""
        kept: list[Tensor] = []
        pending: collectives.Pending | None = None
        for t, part in enumerate(parts):
            if pending is not None:
                self._keep(kept, pending, t - 1, axis)
            pending = collectives.start_reduce(part, self.mesh, axis, t)
        last = pending

        def finish() -> Tensor:
            assert last is not None
            self._keep(kept, last, self.count - 1, axis)
            return kept[0]

        return finish

    def _keep(self, kept: list[Tensor], pending: collectives.Pending, t: int, axis: str) -> None:
        total = pending()
        if t == self.mesh.coord[axis]:
            kept.append(total)
