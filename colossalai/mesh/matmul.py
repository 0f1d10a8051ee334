"""One matrix product for every tensor-parallel mode.

For ``y[m, n] = sum_k x[m, k] w[k, n]`` each mesh axis takes one role, read off the layouts in which x, w and y rest,
and the role says which of the three tensors travels:

====  ==================  =========================  ======================================
role  cuts                what travels               found in
====  ==================  =========================  ======================================
M     the rows            w must be whole: w         2D, 2.5D, 3D, data parallel, ZeRO-3
N     the columns         x must be whole: x         1D column, 2D, 2.5D, 3D
K     the sum             y is partial: y            1D row, 3D, vocabulary tables
====  ==================  =========================  ======================================
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from colossalai.mesh.layout import Layout
from colossalai.mesh.mesh import Axes, Mesh
from colossalai.mesh.movement import move

Role = Literal["M", "N", "K"]


@dataclass(frozen=True)
class MatmulPlan:
    """How ``y = x @ w`` runs when x, w and y rest in the given layouts; fails when the layouts make no sense."""

    x: Layout
    w: Layout
    y: Layout
    prefer_moving_y: bool = False
    """Where an axis cuts both the rows and k: move x's rows and y instead of w (a vocabulary table is large)."""
    roles: dict[str, Role] = field(init=False, compare=False)
    x_use: Layout = field(init=False, compare=False)
    w_use: Layout = field(init=False, compare=False)
    y_use: Layout = field(init=False, compare=False)

    def __post_init__(self) -> None:
        roles = {a: self._role(a) for a in sorted({*self.x.sharded, *self.w.sharded, *self.y.sharded})}

        def only(axes: Axes, role: Role) -> Axes:
            return tuple(a for a in axes if roles[a] == role)

        def having(role: Role) -> frozenset[str]:
            return frozenset(a for a, r in roles.items() if r == role)

        k, n = only(self.w.dims[0], "K"), only(self.w.dims[1], "N")
        rows = tuple(only(axes, "M") for axes in self.x.dims[:-1])
        derived = {
            "roles": roles,
            "x_use": Layout((*rows, k), spread=having("N")),
            "w_use": replace(self.w, dims=(k, n), spread=having("M")),
            "y_use": Layout((*rows, n), partial=frozenset(k)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _role(self, axis: str) -> Role:
        x, w, y, last = self.x.state(axis), self.w.state(axis), self.y.state(axis), len(self.x.dims) - 1
        if w == 1 and y in (last, "I"):
            return "N"
        if w == 0 and x in (last, "I"):
            return "K"
        if x == y and x not in (last, "I"):
            return "K" if w == 0 and self.prefer_moving_y else "M"
        raise ValueError(
            f"axis {axis!r}: no matrix product takes x in state {x} and w in state {w} to y in state {y} "
            f"(x {self.x}, w {self.w}, y {self.y})"
        )


class _Matmul(torch.autograd.Function):
    # Saves x and w at rest and fetches them again in backward: the gathered operands never outlive the product.

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, plan: MatmulPlan, mesh: Mesh) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.plan, ctx.mesh = plan, mesh
        y = move(x, plan.x, plan.x_use, mesh) @ move(w, plan.w, plan.w_use, mesh)
        return move(y, plan.y_use, plan.y, mesh)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, w), p, mesh = ctx.saved_tensors, ctx.plan, ctx.mesh
        dx = dw = None
        dy = move(dy, p.y.dual(), p.y_use.dual(), mesh)
        if ctx.needs_input_grad[0]:
            dx = move(dy @ move(w, p.w, p.w_use, mesh).t(), p.x_use.dual(), p.x.dual(), mesh)
        if ctx.needs_input_grad[1]:
            x = move(x, p.x, p.x_use, mesh)
            dw = move(x.flatten(0, -2).t() @ dy.flatten(0, -2), p.w_use.dual(), p.w.dual(), mesh)
        return dx, dw, None, None


def matmul(x: Tensor, w: Tensor, plan: MatmulPlan, mesh: Mesh) -> Tensor:
    """``x @ w`` by ``plan``; x, w and the result lie in the plan's resting layouts."""
    return _Matmul.apply(x, w, plan, mesh)
