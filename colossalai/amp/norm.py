"""Sums and norms over a model whose parameters are spread over ranks: every distinct element counts once.

The ranks of a model-parallel group hold pieces of some parameters and whole copies of others.  Each rank weighs what it
has by the inverse number of copies in the group, so that one sum over the group is right for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.constants import NUM_PARTITIONS
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


def model_sum(
    values: Iterable[tuple[Tensor, Tensor]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> Tensor:
    """The sum over the whole model of numbers that belong to parameters, given as (parameter, number)."""
    total = torch.zeros((), device=device)
    for p, value in values:
        total += value.to(device, torch.float32) * (_share(p) if groups else 1.0)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def total_norm(
    params: Sequence[Tensor], groups: Sequence[dist.ProcessGroup], norm_type: float, device: torch.device
) -> Tensor:
    """The norm of the gradients of ``params`` on all ranks of ``groups`` together."""
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    grads = [p.grad for p in params if p.grad is not None]
    if not groups:
        return torch.nn.utils.get_total_norm(grads, norm_type).to(device)
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in grads]
    if math.isinf(norm_type):
        largest = torch.stack([torch.zeros((), device=device), *(n.to(device) for n in norms)]).amax()
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return largest
    powers = [(p, n.pow(norm_type)) for p, n in zip(params, norms, strict=True)]
    return model_sum(powers, groups, device).pow(1.0 / norm_type)


def _share(param: Tensor) -> float:
    """One over the number of copies of this piece of ``param`` in the tensor-parallel group of a launched job."""
    if not gpc.is_initialized(ParallelMode.TENSOR):
        return 1.0
    layout = getattr(param, "placement", None)
    pieces = gpc.mesh.group_size(*layout.sharded) if layout is not None and layout.sharded else 1
    return max(pieces, getattr(param, NUM_PARTITIONS, 1)) / gpc.get_world_size(ParallelMode.TENSOR)
