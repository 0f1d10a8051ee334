"""Up and far down in one cycle, with the momentum going the other way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from colossalai.nn.lr_scheduler.schedule import Schedule
from colossalai.registry import LR_SCHEDULERS


def _cosine(start: Any, end: Any, part: float) -> Any:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


def _linear(start: Any, end: Any, part: float) -> Any:
    return start + (end - start) * part


_STRATEGIES: dict[str, Callable[[Any, Any, float], Any]] = {"cos": _cosine, "linear": _linear}


@LR_SCHEDULERS.register_module
class OneCycleLR(Schedule):
    """Super-convergence (Smith and Topin, arXiv 1708.07120); the optimizer's learning rate is the peak.

    From peak / div_factor to the peak in the first ``pct_start`` of the steps, then down to
    peak / div_factor / final_div_factor, which the last step, ``total_steps - 1``, has.  With ``cycle_momentum`` the
    momentum (for Adam: the first beta) goes from ``max_momentum`` to ``base_momentum`` and back.
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
                f"OneCycleLR cycles the momentum, and {type(optimizer).__name__} has none; set cycle_momentum=False"
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
