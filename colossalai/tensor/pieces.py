"""Between a ColoTensor and the plain tensor of its memory, with autograd in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import Layout, Mesh, move, place
from colossalai.mesh._compat import plain_torch
from colossalai.tensor.compute_spec import ComputeSpec
from colossalai.tensor.process_group import TP, ProcessGroup


def as_piece(tensor: Tensor) -> Tensor:
    """The memory of this rank as a plain tensor, with its history."""
    with plain_torch():
        return tensor.as_subclass(Tensor)


def describe(tensor: Any, pg: ProcessGroup, layout: Layout, compute_spec: ComputeSpec | None) -> None:
    """Write on ``tensor`` what it is a piece of."""
    sizes = list(tensor.shape)
    dim, parts = layout.state(TP), pg.tp_world_size()
    if isinstance(dim, int):
        sizes[dim] *= parts
    place(tensor, layout, sizes)
    tensor.process_group, tensor.compute_spec = pg, compute_spec
    tensor.cut_dim = dim if isinstance(dim, int) and parts > 1 else None


class Wrap(torch.autograd.Function):
    """``piece`` as an object of class ``kind``.

    Not ``as_subclass``: its result is a view, and a view cannot be converted in place.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, kind: type[Tensor]) -> Tensor:
        return Tensor._make_subclass(kind, piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ConvertInPlace(torch.autograd.Function):
    """Bring ``x`` itself from ``src`` to ``dst``, which changes its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: Layout, dst: Layout, mesh: Mesh) -> Tensor:
        ctx.route = dst.dual(), src.dual(), mesh
        ctx.mark_dirty(x)
        x.set_(move(as_piece(x), src, dst, mesh))  # type: ignore[call-overload]
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return move(grad, *ctx.route), None, None, None


__all__ = ["ConvertInPlace", "Wrap", "as_piece", "describe", "plain_torch"]
