"""Operations on ColoTensors that need a sum along a dim, also over the ranks with the other pieces: losses,
norms, softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import spread
from colossalai.mesh.row_loss import Classes, row_losses
from colossalai.tensor.colo_tensor import ColoTensor, as_whole, cut_dim, on_wholes, whole_result, wrap
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.ops.embedding import outside
from colossalai.tensor.pieces import as_piece, plain_torch
from colossalai.tensor.process_group import TP

_cross_entropy = torch.nn.functional.cross_entropy


@colo_op_impl(_cross_entropy)
def _(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    usual = weight is None and size_average is None and reduce is None
    usual = usual and not target.is_floating_point() and reduction in ("mean", "sum", "none")
    dim = cut_dim(input)
    if dim is None or dim != min(1, input.ndim - 1) or not usual:
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return on_wholes(_cross_entropy, (input, target, *options), {})
    assert isinstance(input, ColoTensor)
    target = as_piece(as_whole(target))
    valid = target != ignore_index
    classes = Classes(input.size_global(dim), (TP,), input.process_group.mesh)
    if (wrong := outside(target.masked_fill(~valid, 0), classes.number)) is not None:
        raise IndexError(f"cross_entropy: target {wrong} is not one of {classes.number} classes")
    rows = as_piece(input).movedim(dim, -1).reshape(-1, classes.range()[1])
    losses = row_losses(rows, target.masked_fill(~valid, -1).flatten(), classes, label_smoothing)
    losses = losses.view(target.shape).to(input.dtype)
    if reduction != "none":
        losses = losses.sum() / valid.sum() if reduction == "mean" else losses.sum()
    return whole_result(losses, input.process_group)


_normalize = torch.nn.functional.layer_norm


@colo_op_impl(_normalize)
def _(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    dim = cut_dim(input)
    if dim is None or dim >= input.ndim - len(normalized_shape):
        return on_wholes(_normalize, (input, normalized_shape, weight, bias, eps), {})
    assert isinstance(input, ColoTensor)
    pg = input.process_group
    # I -> R: every rank applies the parameters to its own rows
    weight, bias = (None if p is None else spread(as_piece(as_whole(p)), TP, pg.mesh) for p in (weight, bias))
    return wrap(_normalize(as_piece(input), normalized_shape, weight, bias, eps), pg, input.placement)


def _along_one_dim(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func(input, dim, ...)`` of each row along ``dim`` by itself: where another dim is cut, on the
    pieces.
    """

    def implementation(input: Any, *args: Any, **kwargs: Any) -> Any:
        along, cut = args[0] if args else kwargs.get("dim"), cut_dim(input)
        if cut is None or not isinstance(along, int) or along % input.ndim == cut or "out" in kwargs:
            return on_wholes(func, (input, *args), kwargs)
        with plain_torch():
            result = func(as_piece(input), *args, **kwargs)
        return wrap(result, input.process_group, input.placement)

    return implementation


for _owner in (torch, torch.Tensor, torch.nn.functional):
    for _name in ("softmax", "log_softmax"):
        colo_op_impl(getattr(_owner, _name))(_along_one_dim(getattr(_owner, _name)))
