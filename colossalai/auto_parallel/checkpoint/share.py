"""What a parallel plan keeps of a model on a rank's device, beside activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.auto_parallel.checkpoint.meta_model import on_meta
from colossalai.auto_parallel.checkpoint.states import builder_of
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.utils.meta import MetaBytes


@dataclass(frozen=True)
class ModelShare:
    """Bytes of weights, gradients and states on the device of one rank.

    ``fixed`` lies there for the whole step.  ``gradients``: whether every parameter keeps its whole gradient,
    beside ``fixed``, from its backward pass to the step.  ``movable`` bytes lie there where there is room,
    and else on the host; of those there, ``travels`` times as many bytes go to the device or come from it in
    a step.  ``dtype``: what the plan casts weights and operations to.
    """

    fixed: int
    gradients: bool = False
    movable: int = 0
    travels: float = 0.0
    dtype: torch.dtype | None = None


class SharesModel(Protocol):
    """A plan that knows what it will keep of a model: a plugin of ``Booster``."""

    def share_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelShare:
        """What a rank will keep of ``model`` and of the states of ``optimizer``."""

    def take_room(self, nbytes: int) -> None:
        """Weights, gradients and states will have so many bytes of the device."""


def weight_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """The bytes of all parameters and buffers, those with fractions in ``dtype``."""
    return sum(t.numel() * _of(t, dtype).itemsize for t in (*model.parameters(), *model.buffers()))


def gradient_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """The bytes of all gradients."""
    return sum(p.numel() * _of(p, dtype).itemsize for p in model.parameters() if p.requires_grad)


def _of(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def state_bytes(model: nn.Module, optimizer: Optimizer | None, dtype: torch.dtype | None = None) -> int:
    """The bytes of the states of ``optimizer`` for ``model``, and of the weights in single precision
    that training in ``dtype`` needs besides.
    """
    if optimizer is None:
        return 0
    own = isinstance(optimizer, MultiTensorOptimizer)  # these keep what half precision lacks themselves
    masters = 0 if own or dtype in (None, torch.float32) else 4 * sum(p.numel() for p in model.parameters())
    build = builder_of(optimizer, model)
    with on_meta(model, dtype if own else None), MetaBytes() as memory:
        made = build()
        states = memory.now
        del made
    return states + masters
