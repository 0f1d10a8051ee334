"""Down to ``end_lr`` as a power of the part of the training that is left."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from colossalai.nn.lr_scheduler.schedule import Schedule
from colossalai.registry import LR_SCHEDULERS


@LR_SCHEDULERS.register_module
class PolynomialWarmupLR(Schedule):
    """A linear warm-up, then end_lr + (b - end_lr) (part of the steps left) ** power."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if power < 0 or end_lr < 0:
            raise ValueError(
                f"{type(self).__name__} needs end_lr and power of at least 0; got end_lr={end_lr}, power={power}"
            )
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, last_epoch, warmup_steps=warmup_steps)

    def curve(self, base: Any, step: int) -> Any:
        return self.end_lr + (base - self.end_lr) * (1 - step / self.curve_steps) ** self.power


@LR_SCHEDULERS.register_module
class PolynomialLR(PolynomialWarmupLR):
    """end_lr + (b - end_lr) (part of the steps left) ** power."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)
