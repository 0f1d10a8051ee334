"""Norms and counts over the gradients of the whole model, wherever its parts lie."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from colossalai.mesh import clip_grads, grad_zeros
from colossalai.utils.parallel import launched_mesh


def clip_grad_norm_fp32(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> float:
    """Scale all gradients so that their norm, computed in fp32 over the whole model, is at most ``max_norm``.

    Pieces of a parameter that is cut over ranks are added up, copies are counted once.  Returns the norm before.
    """
    return float(clip_grads(_list(parameters), max_norm, launched_mesh(), norm_type))


def count_zeros_fp32(parameters: Tensor | Iterable[Tensor]) -> int:
    """How many elements of all gradients are zero; pieces are added up, copies are counted once."""
    return grad_zeros(_list(parameters), launched_mesh())


def _list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
