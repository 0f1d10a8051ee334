"""fp16 by torch's autocast and ``GradScaler``, on CUDA and on the CPU.

Small gradients vanish in fp16, so the loss is multiplied by a scale before the backward pass and the gradients are
divided by it before they are used.  A gradient that overflows shows as inf or nan: that step is skipped and the scale
reduced.  Under data parallelism the averaged gradients are the same on every rank, and so is the decision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from colossalai.booster.mixed_precision.autocast import AutocastModel, autocast_criterion, device_type_of
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision
from colossalai.interface import OptimizerWrapper


class TorchAMPOptimizer(OptimizerWrapper):
    """An optimizer that scales losses, and unscales gradients once: when they are clipped, or else when it steps."""

    def __init__(self, optim: Optimizer, scaler: GradScaler) -> None:
        super().__init__(optim)
        self.scaler = scaler
        self._unscaled = False

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._unscaled:
            raise RuntimeError(
                "the gradients were unscaled already (by clipping), and a scaled loss cannot be added to them; call"
                " optimizer.step() or optimizer.zero_grad() before the next backward pass"
            )
        super().backward(loss, *args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def unscale_grad(self) -> None:
        if not self._unscaled and self._has_grad():
            self.scaler.unscale_(self.optim)
            self._unscaled = True

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is inf or nan; then only the loss scale is reduced."""
        if args or kwargs:
            raise ValueError("an optimizer under fp16 takes no closure: the loss scale may skip the step")
        if not self._has_grad():
            return self.optim.step()
        result = self.scaler.step(self.optim)
        # a skipped step is no reason for torch to warn that the scheduler ran before the optimizer
        self.optim._opt_called = True  # type: ignore[attr-defined]
        self._end_of_iteration()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        if self._unscaled:  # the gradients were clipped and then thrown away
            self._end_of_iteration()

    def _end_of_iteration(self) -> None:
        self.scaler.update()
        self._unscaled = False

    def _has_grad(self) -> bool:
        return any(p.grad is not None for p in self.parameters())


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
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ValueError(
                "FP16TorchMixedPrecision needs init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and"
                f" growth_interval >= 1; got {init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}"
            )
        self.scaler_options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        device_type = device_type_of(model)
        if optimizer is not None:
            optimizer = TorchAMPOptimizer(optimizer, GradScaler(device_type, **self.scaler_options))
        if criterion is not None:
            criterion = autocast_criterion(criterion, device_type, torch.float16)
        return AutocastModel(model, device_type, torch.float16), optimizer, criterion
