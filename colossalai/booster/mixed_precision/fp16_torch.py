"""fp16 by torch's autocast and gradient scaler: the booster's front of ``colossalai.amp.torch_amp``."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from colossalai.amp.torch_amp import TorchAMPOptimizer
from colossalai.amp.torch_amp.convert import TorchOptions, torch_amp
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision

__all__ = ["FP16TorchMixedPrecision", "TorchAMPOptimizer"]


class FP16TorchMixedPrecision(MixedPrecision):
    """Matrix products and convolutions in fp16; weights, gradients and the optimizer in the model's own dtype.

    Args:
        init_scale: the first factor of the loss.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: what it is multiplied by after a step that overflowed.
        growth_interval: how many good steps it takes to grow.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.options = TorchOptions(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        return torch_amp(model, optimizer, criterion, self.options)
