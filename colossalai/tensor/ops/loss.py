"""Cross entropy of logits whose classes are cut: no rank ever holds the logits of all classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import collectives, local_range, reduce
from colossalai.tensor.colo_tensor import ColoTensor, as_whole, cut_dim, on_wholes
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.ops.embedding import outside
from colossalai.tensor.pieces import as_piece
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
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    usual = usual and not target.is_floating_point() and reduction in ("mean", "sum", "none")
    if cut_dim(input) != min(1, input.ndim - 1) or not usual:
        options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return on_wholes(_cross_entropy, (input, target, *options), {})
    assert isinstance(input, ColoTensor)
    target = as_piece(as_whole(target))
    valid = target != ignore_index
    target, classes = target.masked_fill(~valid, 0), input.size_global(min(1, input.ndim - 1))
    if (wrong := outside(target, classes)) is not None:
        raise IndexError(f"cross_entropy: target {wrong} is not one of {classes} classes")
    losses = _losses(input, target).masked_fill(~valid, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / valid.sum() if reduction == "mean" else losses.sum()


def _losses(logits: ColoTensor, target: Tensor) -> Tensor:
    """log(sum of exp) minus the logit of the target; each rank adds what it has of both, P -> I."""
    mesh, dim = logits.process_group.mesh, cut_dim(logits)
    assert dim is not None
    start, length = local_range(logits.size_global(dim), (TP,), mesh)
    z = as_piece(logits)
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    peak = collectives.all_reduce(z.detach().amax(dim), mesh, TP, dist.ReduceOp.MAX)
    z = z - peak.unsqueeze(dim)
    index = (target - start).unsqueeze(dim)
    inside = (index >= 0) & (index < length)
    picked = (z.gather(dim, index.clamp(0, length - 1)) * inside).squeeze(dim)
    picked, total = reduce(torch.stack([picked, z.exp().sum(dim)]), TP, mesh)
    return (total.log() - picked).to(logits.dtype)
