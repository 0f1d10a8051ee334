"""A loss scale that looks for the largest value that does not overflow."""

from __future__ import annotations

from typing import Any

from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import BaseGradScaler


class DynamicGradScaler(BaseGradScaler):
    """Grow after ``growth_interval`` good steps in a row, back off after overflows.

    Args:
        initial_scale: the first scale.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what it is multiplied by when it backs off.
        growth_interval: how many good steps in a row it takes to grow.
        min_scale: the scale never becomes smaller than this.
        max_scale: nor larger than this.
        hysteresis: the scale backs off at this overflow since it last grew and at every one after it; those
            before are forgiven, as single bad batches are.
        verbose: log every change of the scale, on rank 0.
    """

    def __init__(
        self,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 2,
        verbose: bool = False,
    ) -> None:
        super().__init__(initial_scale, verbose)
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1 and hysteresis >= 1):
            raise ValueError(
                "DynamicGradScaler needs growth_factor > 1, 0 < backoff_factor < 1, growth_interval >= 1 and"
                f" hysteresis >= 1; got {growth_factor}, {backoff_factor}, {growth_interval}, {hysteresis}"
            )
        low, high = min_scale or 0.0, float("inf") if max_scale is None else max_scale
        if not low <= initial_scale <= high:
            raise ValueError(
                f"DynamicGradScaler needs min_scale <= initial_scale <= max_scale, got {min_scale} <="
                f" {initial_scale} <= {max_scale}"
            )
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._low, self._high = low, high
        self._good_steps = 0
        self._overflows = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self._good_steps = 0
            self._overflows += 1
            if self._overflows >= self._hysteresis:
                self._set(max(self._scale * self._backoff_factor, self._low), "an overflow")
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps = self._overflows = 0
            self._set(
                min(self._scale * self._growth_factor, self._high), f"{self._growth_interval} good steps"
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "good_steps": self._good_steps, "overflows": self._overflows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # a fixed scale, or torch's scaler, has counted nothing
        self._good_steps = int(state_dict.get("good_steps", 0))
        self._overflows = int(state_dict.get("overflows", 0))

    def _set(self, scale: float, reason: str) -> None:
        # without a floor the scale may reach what float32 cannot hold, and a loss times 0 would look healthy
        scale = max(scale, 2.0**-100)
        if scale != self._scale:
            self.log(f"loss scale {self._scale:g} -> {scale:g} after {reason}")
        self._scale = scale
