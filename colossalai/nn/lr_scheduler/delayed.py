"""Put a warm-up, a delay, or both, before any scheduler of torch or of this package.

Until it is its turn the other scheduler stays at its step 0; then its steps are counted from there.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.nn.lr_scheduler.schedule import as_count, set_rates


class WarmupDelayerScheduler(LRScheduler):
    """Linear warm-up for ``warmup_epochs`` steps, constant for ``delay_epochs`` steps, then
    ``after_scheduler``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_epochs: int,
        delay_epochs: int,
        after_scheduler: LRScheduler,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_epochs = as_count(self, "warmup_epochs", warmup_epochs, 0)
        self.delay_epochs = as_count(self, "delay_epochs", delay_epochs, 0)
        if not isinstance(after_scheduler, LRScheduler):
            raise TypeError(
                f"{type(self).__name__} needs after_scheduler, a learning-rate scheduler;"
                f" got {type(after_scheduler).__name__}"
            )
        if after_scheduler.optimizer.param_groups is not optimizer.param_groups:
            raise ValueError(
                f"{type(self).__name__} and its after_scheduler must be built on the same optimizer;"
                f" got {type(optimizer).__name__} and another {type(after_scheduler.optimizer).__name__}"
            )
        self.after_scheduler = after_scheduler
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.warmup_epochs:
            return [base * (self.last_epoch + 1) / self.warmup_epochs for base in self.base_lrs]
        if self.last_epoch < self.warmup_epochs + self.delay_epochs:
            return list(self.base_lrs)
        return self.after_scheduler.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        if epoch is not None:  # the other scheduler may only know how to go on by one
            raise ValueError(f"{type(self).__name__}.step takes no epoch; it counts its calls. Got {epoch!r}")
        # the constructor of torch steps us once, when the other scheduler is already where it should be
        constructed = hasattr(self, "_last_lr")
        if constructed and self.last_epoch >= self.warmup_epochs + self.delay_epochs:
            self.after_scheduler.step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"after_scheduler": self.after_scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.after_scheduler.load_state_dict(own.pop("after_scheduler"))
        super().load_state_dict(own)
        set_rates(self)


class WarmupScheduler(WarmupDelayerScheduler):
    """Linear warm-up for ``warmup_epochs`` steps, then ``after_scheduler``."""

    def __init__(
        self, optimizer: Optimizer, warmup_epochs: int, after_scheduler: LRScheduler, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, warmup_epochs, 0, after_scheduler, last_epoch)


class DelayerScheduler(WarmupDelayerScheduler):
    """The optimizer's learning rate for ``delay_epochs`` steps, then ``after_scheduler``."""

    def __init__(
        self, optimizer: Optimizer, delay_epochs: int, after_scheduler: LRScheduler, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, 0, delay_epochs, after_scheduler, last_epoch)
