"""``MixedPrecision``: what a precision does to a model, its optimizer and its criterion."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer

from colossalai.amp.autocast import Criterion

__all__ = ["Criterion", "MixedPrecision"]


class MixedPrecision(ABC):
    """A way to compute in less than 32 bits.

    The booster applies it after the device and before the plugin.
    """

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        """The three, ready to compute in this precision; ``model`` is on its device already."""
