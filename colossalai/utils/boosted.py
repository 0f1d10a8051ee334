"""Which models and optimizers a ``Booster`` has prepared in this process, for layers that need one."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

SHARED_EXPERTS = (
    "experts that ranks share out",
    ", and torch's own DistributedDataParallel overwrites the experts of all ranks by those of one",
)
CUT_SEQUENCES = ("sequences of which each rank has some tokens",)

_items: WeakSet[Any] = WeakSet()
_parts: WeakSet[nn.Module] = WeakSet()


def mark_boosted(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Note that ``model`` was boosted, and with it its optimizer."""
    _items.update([model] if optimizer is None else [model, optimizer])
    _parts.update(model.modules())


def is_boosted(item: Any) -> bool:
    """Whether ``item`` itself was boosted."""
    return item in _items


def warn_unless_boosted(layer: nn.Module, has: str, otherwise: str = "") -> None:
    """Warn of a ``layer`` that trains outside of a boosted model, where its ranks' gradients stay apart.

    ``has`` says what it has, and ``otherwise`` what else goes wrong then.
    """
    if not torch.compiler.is_compiling() and layer not in _parts:
        warnings.warn(
            f"{type(layer).__name__} has {has}, and a plugin averages their gradients, but its model was not"
            f" boosted: the weights of the ranks will drift apart{otherwise}; use Booster(plugin='ddp')"
            ".boost(model, optimizer), or colossalai.initialize",
            stacklevel=3,
        )
        _parts.add(layer)  # once
