"""The learning-rate schedules: cosine, steps, exponential, linear, one cycle, polynomial, and functions of
the user's own.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR as TorchLambdaLR
from torch.optim.lr_scheduler import MultiplicativeLR as TorchMultiplicativeLR

from colossalai.nn.lr_scheduler.schedule import Ending, Schedule, as_count
from colossalai.registry import LR_SCHEDULERS

# ---- Down to ``eta_min`` along half a cosine, at once or after warm-up or a flat part ----


class _Cosine(Schedule):
    eta_min: float

    def curve(self, base: Any, step: int) -> Any:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * step / self.curve_steps)) / 2


@LR_SCHEDULERS.register_module
class CosineAnnealingLR(_Cosine):
    """From the optimizer's learning rate to ``eta_min`` along half a cosine, in ``total_steps`` steps.

    Other keywords are options of schedulers that this one may replace in a config (``warmup_steps`` ...);
    they have no effect here, and a warning says so.
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
    """A linear warm-up; then flat for the fraction ``pct_start`` of the remaining steps; then half a
    cosine.
    """

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
                f"{type(self).__name__} is flat for pct_start of the steps, a fraction from 0 to 1; got"
                f" {pct_start}"
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


# ---- Multiplied by ``gamma``: at milestones, every so many steps, or every step ----


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

    Milestones count from the start of the training, warm-up included.  One inside the warm-up has no effect,
    and a warning says so.
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
                f"{type(self).__name__} needs milestones, the steps at which the rate drops; got"
                f" {milestones!r}"
            )
        warmup_steps = as_count(self, "warmup_steps", warmup_steps, 0)
        steps = sorted(as_count(self, "milestones", m, 0) for m in milestones)
        self.milestones = [m - warmup_steps for m in steps if m >= warmup_steps]
        self.gamma = gamma
        if early := [m for m in steps if m < warmup_steps]:
            warnings.warn(
                f"{type(self).__name__} ignores milestones {early}: they are inside the {warmup_steps} steps"
                " of warm-up",
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


# ---- Straight up, then straight down ----


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


# ---- Up and far down in one cycle, with the momentum going the other way ----


def _cosine(start: Any, end: Any, part: float) -> Any:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def _linear(start: Any, end: Any, part: float) -> Any:
    return start + (end - start) * part


_STRATEGIES: dict[str, Callable[[Any, Any, float], Any]] = {"cos": _cosine, "linear": _linear}


@LR_SCHEDULERS.register_module
class OneCycleLR(Schedule):
    """Super-convergence (Smith and Topin, arXiv 1708.07120); the optimizer's learning rate is the peak.

    From peak / div_factor to the peak in the first ``pct_start`` of the steps, then down to peak / div_factor
    / final_div_factor, which the last step, ``total_steps - 1``, has.  With ``cycle_momentum`` the momentum
    (for Adam: the first beta) goes from ``max_momentum`` to ``base_momentum`` and back.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= pct_start <= 1:
            raise ValueError(
                f"OneCycleLR rises for pct_start of the steps, a fraction from 0 to 1; got {pct_start}"
            )
        if anneal_strategy not in _STRATEGIES:
            raise ValueError(
                f"OneCycleLR knows the anneal_strategy {' and '.join(_STRATEGIES)}; got {anneal_strategy!r}"
            )
        defaults = optimizer.defaults
        if cycle_momentum and "momentum" not in defaults and "betas" not in defaults:
            raise ValueError(
                f"OneCycleLR cycles the momentum, and {type(optimizer).__name__} has none; set"
                " cycle_momentum=False"
            )
        self.pct_start, self.anneal_strategy, self.cycle_momentum = pct_start, anneal_strategy, cycle_momentum
        self.base_momentum, self.max_momentum = base_momentum, max_momentum
        self.div_factor, self.final_div_factor = div_factor, final_div_factor
        super().__init__(optimizer, total_steps, last_epoch)

    def curve(self, base: Any, step: int) -> Any:
        lowest = base / self.div_factor
        return self._cycle(lowest, base, lowest / self.final_div_factor, step)

    def rates(self) -> list[Any]:
        self._set_momentum()
        return super().rates()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_momentum()

    def _cycle(self, start: Any, middle: Any, end: Any, step: int) -> Any:
        """start -> middle at the peak, middle -> end at the last step."""
        anneal = _STRATEGIES[self.anneal_strategy]
        last = self.total_steps - 1
        peak = self.pct_start * self.total_steps - 1
        step = min(step, last)
        if step < peak:
            return anneal(start, middle, step / peak)
        return anneal(middle, end, (step - peak) / (last - peak) if last > peak else 1.0)

    def _set_momentum(self) -> None:
        if not self.cycle_momentum:
            return
        momentum = self._cycle(
            self.max_momentum, self.base_momentum, self.max_momentum, min(self.last_epoch, self.total_steps)
        )
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum


# ---- Down to ``end_lr`` as a power of the part of the training that is left ----


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
                f"{type(self).__name__} needs end_lr and power of at least 0; got end_lr={end_lr},"
                f" power={power}"
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


# ---- torch's schedulers of user functions, with our ``total_steps`` ----

Factor = Callable[[int], float]


class _Lambda(Ending):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Factor | Sequence[Factor] | None = None,
        last_epoch: int = -1,
    ) -> None:
        if lr_lambda is None:
            raise ValueError(
                f"{type(self).__name__} needs lr_lambda, a function of the step (or one per parameter group)"
            )
        super().__init__(optimizer, total_steps, last_epoch, lr_lambda=lr_lambda)


@LR_SCHEDULERS.register_module
class LambdaLR(_Lambda, TorchLambdaLR):
    """The optimizer's learning rate times ``lr_lambda(step)``."""


@LR_SCHEDULERS.register_module
class MultiplicativeLR(_Lambda, TorchMultiplicativeLR):
    """The rate of the step before times ``lr_lambda(step)``."""
