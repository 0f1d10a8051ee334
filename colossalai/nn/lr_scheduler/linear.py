"""Straight up, then straight down."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from colossalai.nn.lr_scheduler.schedule import Schedule
from colossalai.registry import LR_SCHEDULERS


@LR_SCHEDULERS.register_module
class LinearWarmupLR(Schedule):
    """Up to the optimizer's learning rate, which step ``warmup_steps`` has, and down to 0 at ``total_steps``.

    The triangle has its peak once, so the warm-up rises in ``warmup_steps + 1`` parts:
    b (t + 1) / (w + 1), then b (total - t) / (total - w).
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, last_epoch, warmup_steps=warmup_steps)

    def rate(self, base: Any, step: int) -> Any:
        if step < self.warmup_steps:
            return base * (step + 1) / (self.warmup_steps + 1)
        return self.curve(base, step - self.warmup_steps)

    def curve(self, base: Any, step: int) -> Any:
        return base * (self.curve_steps - step) / self.curve_steps
