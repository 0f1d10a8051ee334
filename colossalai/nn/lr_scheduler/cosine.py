"""Down to ``eta_min`` along half a cosine, at once or after warm-up or a flat part."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.optim import Optimizer

from colossalai.nn.lr_scheduler.schedule import Schedule, as_count
from colossalai.registry import LR_SCHEDULERS


class _Cosine(Schedule):
    eta_min: float

    def curve(self, base: Any, step: int) -> Any:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / self.curve_steps)) / 2


@LR_SCHEDULERS.register_module
class CosineAnnealingLR(_Cosine):
    """From the optimizer's learning rate to ``eta_min`` along half a cosine, in ``total_steps`` steps.

    Other keywords are options of schedulers that this one may replace in a config (``warmup_steps`` ...); they have
    no effect here, and a warning says so.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            warnings.warn(f"CosineAnnealingLR does not use {', '.join(sorted(kwargs))}", stacklevel=2)
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, last_epoch)


@LR_SCHEDULERS.register_module
class CosineAnnealingWarmupLR(_Cosine):
    """A linear warm-up of ``warmup_steps``, then half a cosine to ``eta_min`` in the remaining steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, last_epoch, warmup_steps=warmup_steps)


@LR_SCHEDULERS.register_module
class FlatAnnealingWarmupLR(_Cosine):
    """A linear warm-up; then flat for the fraction ``pct_start`` of the remaining steps; then half a cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= pct_start <= 1:
            raise ValueError(
                f"{type(self).__name__} is flat for pct_start of the steps, a fraction from 0 to 1; got {pct_start}"
            )
        self.eta_min = eta_min
        steps = as_count(self, "total_steps", total_steps, 1) - as_count(
            self, "warmup_steps", warmup_steps, 0
        )
        super().__init__(
            optimizer,
            total_steps,
            last_epoch,
            warmup_steps=warmup_steps,
            flat_steps=int(max(0, steps) * pct_start),
        )


@LR_SCHEDULERS.register_module
class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """Flat for the fraction ``pct_start`` of the steps, then half a cosine to 0."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)
