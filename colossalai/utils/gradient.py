"""Norms and counts over the gradients of the whole model, wherever its parts lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import clip_grads, collectives, placement


def clip_grad_norm_fp32(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> float:
    """Scale all gradients so that their norm, computed in fp32 over the whole model, is at most ``max_norm``.

    Pieces of a parameter that is cut over ranks are added up, copies are counted once.  Returns the norm before.
    """
    params = _list(parameters)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        return float(torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type))
    return float(clip_grads(params, max_norm, gpc.mesh, norm_type))


def count_zeros_fp32(parameters: Tensor | Iterable[Tensor]) -> int:
    """How many elements of all gradients are zero; pieces are added up, copies are counted once."""
    total = 0
    for p in _list(parameters):
        if p.grad is not None:
            zeros = (p.grad.detach() == 0).sum()
            for axis in sorted(placement(p).sharded):
                zeros = collectives.all_reduce(zeros, gpc.mesh, axis)
            total += int(zeros)
    return total


def _list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
