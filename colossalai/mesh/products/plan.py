"""``MatmulPlan``: which of the three tensors of a matrix product travels on which axis.

For ``y[m, n] = sum_k x[m, k] w[k, n]`` each mesh axis takes one role, read off the layouts in which x, w and
y rest, and the role says which of the three tensors travels:

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
from typing import Literal

from torch import Tensor

from colossalai.mesh.layout import Layout
from colossalai.mesh.mesh import Axes, Mesh

Role = Literal["M", "N", "K"]
Order = Literal["io", "oi"]


@dataclass(frozen=True)
class MatmulPlan:
    """A plan for ``y = x @ w`` with x, w and y in the given layouts; refuses layouts that make no sense."""

    x: Layout
    w: Layout
    y: Layout
    prefer_moving_y: bool = False
    """Where an axis cuts both the rows and k: move x's rows and y instead of w (a vocabulary table is
    large).
    """
    keep_operands: bool = False
    """Keep what was gathered of x and w for the backward pass, instead of fetching it again."""
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
            "y_use": Layout((*rows, n), partial=frozenset(k), fused=self.y.fused),
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


@dataclass(frozen=True)
class Stored:
    """The order of a weight in memory: (in, out), or (out, in) as in torch; plans are written (in, out)."""

    order: Order = "io"
    shape: tuple[int, ...] | None = None
    """The whole shape as stored, where pieces may differ in length."""

    def layout(self, in_out: Layout) -> Layout:
        return in_out if self.order == "io" else in_out.transposed()

    def out_in(self, w: Tensor) -> Tensor:
        return w if self.order == "oi" else w.t()

    def gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """The weight's gradient as it is stored, from (rows, in) and (rows, out)."""
        return x.t() @ dy if self.order == "io" else dy.t() @ x

    def whole_y(self, y: Tensor, layout: Layout, mesh: Mesh) -> tuple[int, ...] | None:
        """The shape of the whole product where its last dim may be cut unevenly; ``y`` lies in ``layout``."""
        if self.shape is None:
            return None
        rows = (n * mesh.group_size(*axes) for n, axes in zip(y.shape[:-1], layout.dims[:-1], strict=True))
        return (*rows, self.shape[0 if self.order == "oi" else 1])
