"""Shapes and indices, which are those of the whole tensor; the cut is kept wherever pieces of the result are
pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossalai.tensor.colo_tensor import ColoTensor, cut_dim, is_view_of_parameter, on_wholes, wrap
from colossalai.tensor.compute_spec import ComputeSpec
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece, plain_torch


def _view(x: ColoTensor, piece: Tensor, dim: int, compute_spec: ComputeSpec | None = None) -> ColoTensor:
    """``piece``, which is a view of that of ``x``, as a piece of a tensor that is cut along ``dim``."""
    view = wrap(piece, x.process_group, cut_along(dim, piece.ndim), compute_spec)
    view.views_parameter = is_view_of_parameter(x)
    return view


@colo_op_impl(Tensor.size)
def _(self: Tensor, dim: int | None = None) -> Any:
    if isinstance(self, ColoTensor):
        return self.size_global(dim)
    return Tensor.size(self) if dim is None else Tensor.size(self, dim)


@colo_op_impl(Tensor.__len__)
def _(self: ColoTensor) -> int:
    if not self.ndim:
        raise TypeError("len() of a 0-d tensor")
    return self.full_shape[0]


def _reshape(func: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        dim = cut_dim(x)
        if dim is None or any(isinstance(a, torch.dtype) for a in args):
            return on_wholes(func, args, kwargs)
        assert isinstance(x, ColoTensor)
        rest = [torch.empty(a.size(), device="meta") if isinstance(a, Tensor) else a for a in args[1:]]
        sizes = list(func(torch.empty(x.full_shape, device="meta"), *rest, **kwargs).shape)
        # The tensor is a row of blocks, one for each index before the cut, and each rank holds the same part
        # of every block. So the cut can be where a new dim begins exactly at a block and is a multiple of the
        # number of ranks.
        parts, blocks = x.get_tp_world_size(), math.prod(x.full_shape[:dim])
        places = [d for d, n in enumerate(sizes) if math.prod(sizes[:d]) == blocks and n and n % parts == 0]
        if not places:
            return on_wholes(func, args, kwargs)
        new = places[0]
        local = [n // parts if d == new else n for d, n in enumerate(sizes)]
        piece = as_piece(x)
        result = piece.view(local) if func.__name__.startswith("view") else piece.reshape(local)
        return _view(x, result, new)

    return implementation


def _permute(func: Callable[..., Any]) -> Callable[..., Any]:
    def implementation(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        dim = cut_dim(x)
        if dim is None:
            return on_wholes(func, args, kwargs)
        assert isinstance(x, ColoTensor)
        # no two sizes are equal, so that the one of the cut can be found again
        probe = torch.empty(tuple(range(2, 2 + x.ndim)), device="meta")
        new = list(func(probe, *args[1:], **kwargs).shape).index(2 + dim)
        with plain_torch():
            result = func(as_piece(x), *args[1:], **kwargs)
        return _view(x, result, new, x.compute_spec)

    return implementation


for _name in [
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "flatten",
    "ravel",
    "unflatten",
    "squeeze",
    "unsqueeze",
]:
    for _owner in (torch, Tensor):
        if hasattr(_owner, _name):
            colo_op_impl(getattr(_owner, _name))(_reshape(getattr(_owner, _name)))

for _name in ["transpose", "swapaxes", "swapdims", "t", "permute", "movedim", "moveaxis"]:
    for _owner in (torch, Tensor):
        colo_op_impl(getattr(_owner, _name))(_permute(getattr(_owner, _name)))

_TRANSPOSES = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)
for _getter in (each.__get__ for each in _TRANSPOSES):  # type: ignore[attr-defined]
    colo_op_impl(_getter)(_permute(_getter))


@colo_op_impl(Tensor.__getitem__)
def _(self: Tensor, index: Any) -> Any:
    dim = cut_dim(self)
    items = index if isinstance(index, tuple) else (index,)
    plain = all(i is None or i is ... or type(i) in (int, slice) for i in items)
    new = _dim_after(items, dim, self.ndim) if plain and dim is not None else None
    if new is None:
        return on_wholes(Tensor.__getitem__, (self, index), {})
    assert isinstance(self, ColoTensor)
    return _view(self, as_piece(self)[index], new)


def _dim_after(items: tuple[Any, ...], dim: int, ndim: int) -> int | None:
    """Where ``dim`` is after indexing with ``items``; None if the index chooses from it."""
    named = [i for i in items if i is not None and i is not ...]
    if len(named) > ndim:
        return None  # torch has the words for this error
    where = items.index(...) if ... in items else len(items)
    filled = [*items[:where], *[slice(None)] * (ndim - len(named)), *items[where + 1 :]]
    old = new = 0
    for item in filled:
        if item is not None and old == dim:
            return new if item == slice(None) else None
        old += item is not None
        new += type(item) is not int
    return None
