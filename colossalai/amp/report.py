"""Warnings about skipped steps: one when the first step is skipped, and more only if they do not end."""

from __future__ import annotations

from colossalai.logging import get_dist_logger


class SkipReport:
    """Counts skipped steps and writes a warning, on rank 0, at the first one and at 10, 100, ... in a row.

    A dynamic loss scale overflows now and then by design; a warning for each would hide the one that matters.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.total = 0
        self.in_a_row = 0
        self._next_summary = 10

    def good_step(self) -> None:
        self.in_a_row, self._next_summary = 0, 10

    def skipped_step(self, scale: float, next_scale: float) -> None:
        """The gradients overflowed under ``scale``; the next ones will be under ``next_scale``."""
        self.total += 1
        self.in_a_row += 1
        if not self.enabled:
            return
        if self.total == 1:
            why = (
                " still (it falls at a later overflow: see hysteresis and min_scale)"
                if next_scale == scale
                else ""
            )
            self._warn(
                f"Found overflow. Skip step: a gradient overflowed at loss scale {scale:g}: this step is"
                f" skipped, the next loss scale is {next_scale:g}{why}. Now and then this is normal; it is"
                " reported again only if it does not end"
            )
        elif self.in_a_row == self._next_summary:
            self._next_summary *= 10
            self._warn(
                f"{self.in_a_row} steps in a row were skipped ({self.total} in all), the loss scale is now"
                f" {next_scale:g}. Is the loss nan or inf? Look at the data and the learning rate"
            )

    def _warn(self, message: str) -> None:
        get_dist_logger("colossalai.amp").warning(message, ranks=[0])
