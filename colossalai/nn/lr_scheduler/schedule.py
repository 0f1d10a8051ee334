"""A schedule is a function of the step: warm-up, a flat part, then a curve down to the last step.

With base learning rate b, w warm-up steps and f flat steps, the rate at step t is

    b (t + 1) / w        while t < w
    b                    while t < w + f
    curve(b, t - w - f)  up to t = total_steps, and held from there on, with one warning.

Nothing is accumulated from step to step, so a schedule that is resumed from ``state_dict`` follows the same
numbers to the last bit.  What a step is, an iteration or an epoch, the caller of ``step`` decides;
``total_steps`` counts the same.
"""

from __future__ import annotations

import operator
import warnings
from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def as_count(owner: object, name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``, or an error that names the scheduler and the argument."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(
            f"{type(owner).__name__} needs {name}, a number of steps, as an int of at least {least}; got"
            f" {value!r}"
        )
    return count


def set_rates(scheduler: LRScheduler) -> None:
    """Write the rates of the scheduler's last step into its optimizer."""
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class Ending(LRScheduler):
    """The base of our schedulers: they know their last step, and hold its rate if stepped further."""

    def __init__(self, optimizer: Optimizer, total_steps: int, last_epoch: int = -1, **kwargs: Any) -> None:
        self.total_steps = as_count(self, "total_steps", total_steps, 1)
        super().__init__(optimizer, last_epoch=last_epoch, **kwargs)

    def get_lr(self) -> list[Any]:
        if self.last_epoch <= self.total_steps:
            return self.rates()
        if self.last_epoch == self.total_steps + 1:
            warnings.warn(
                f"{type(self).__name__} ended after total_steps={self.total_steps} and is stepped further;"
                " it keeps the learning rate of its last step. If training is longer, give it more"
                " total_steps",
                stacklevel=4,
            )
        return self.get_last_lr()

    def rates(self) -> list[Any]:
        """The learning rate of each parameter group at step ``self.last_epoch``."""
        return super().get_lr()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; the rates enter the optimizer at once, whether or not its own state is
        loaded.
        """
        groups = self.optimizer.param_groups
        if (saved := len(state_dict.get("base_lrs", groups))) != len(groups):
            raise ValueError(
                f"the state of {type(self).__name__} is that of an optimizer with {saved} parameter groups;"
                f" this one has {len(groups)}"
            )
        super().load_state_dict(state_dict)
        set_rates(self)


class Schedule(Ending):
    """A subclass writes ``curve`` and says how many steps are warm-up and flat."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        last_epoch: int = -1,
        *,
        warmup_steps: int = 0,
        flat_steps: int = 0,
    ) -> None:
        self.warmup_steps = as_count(self, "warmup_steps", warmup_steps, 0)
        self.flat_steps = as_count(self, "flat_steps", flat_steps, 0)
        super().__init__(optimizer, total_steps, last_epoch)
        if self.warmup_steps > self.total_steps:
            warnings.warn(
                f"{type(self).__name__} warms up for {self.warmup_steps} of total_steps={self.total_steps}"
                " steps: the learning rate never reaches its full value",
                stacklevel=3,
            )

    @property
    def curve_steps(self) -> int:
        """The steps left for the curve; at least one, so that a curve can divide by it."""
        return max(1, self.total_steps - self.warmup_steps - self.flat_steps)

    def rates(self) -> list[Any]:
        return [self.rate(base, self.last_epoch) for base in self.base_lrs]

    def rate(self, base: Any, step: int) -> Any:
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        return self.curve(base, max(0, step - self.warmup_steps - self.flat_steps))

    @abstractmethod
    def curve(self, base: Any, step: int) -> Any:
        """The rate ``step`` steps after the warm-up and flat parts, out of ``self.curve_steps``."""
