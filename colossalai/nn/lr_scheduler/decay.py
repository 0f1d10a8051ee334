"""Multiplied by ``gamma``: at milestones, every so many steps, or every step."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from colossalai.nn.lr_scheduler.schedule import Schedule, as_count
from colossalai.registry import LR_SCHEDULERS


class _Decay(Schedule):
    gamma: float

    def decays(self, step: int) -> int:
        """How many times the rate has been multiplied by ``gamma``, ``step`` steps after the warm-up."""
        return step

    def curve(self, base: Any, step: int) -> Any:
        return base * self.gamma ** self.decays(step)


@LR_SCHEDULERS.register_module
class MultiStepWarmupLR(_Decay):
    """A linear warm-up; the rate is multiplied by ``gamma`` at each milestone.

    Milestones count from the start of the training, warm-up included.  One inside the warm-up has no effect, and a
    warning says so.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not milestones:
            raise ValueError(
                f"{type(self).__name__} needs milestones, the steps at which the rate drops; got {milestones!r}"
            )
        warmup_steps = as_count(self, "warmup_steps", warmup_steps, 0)
        steps = sorted(as_count(self, "milestones", m, 0) for m in milestones)
        self.milestones = [m - warmup_steps for m in steps if m >= warmup_steps]
        self.gamma = gamma
        if early := [m for m in steps if m < warmup_steps]:
            warnings.warn(
                f"{type(self).__name__} ignores milestones {early}: they are inside the {warmup_steps} steps of warm-up",
                stacklevel=2,
            )
        super().__init__(optimizer, total_steps, last_epoch, warmup_steps=warmup_steps)

    def decays(self, step: int) -> int:
        return bisect_right(self.milestones, step)


@LR_SCHEDULERS.register_module
class MultiStepLR(MultiStepWarmupLR):
    """Multiplied by ``gamma`` at each milestone."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, milestones=milestones, gamma=gamma, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class StepLR(_Decay):
    """Multiplied by ``gamma`` every ``step_size`` steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.step_size = as_count(self, "step_size", step_size, 1)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, last_epoch)

    def decays(self, step: int) -> int:
        return step // self.step_size


@LR_SCHEDULERS.register_module
class ExponentialLR(_Decay):
    """Multiplied by ``gamma`` every step."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
    ) -> None:
        self.gamma = gamma
        super().__init__(optimizer, total_steps, last_epoch)
