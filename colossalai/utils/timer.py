"""Stopwatches for training loops.

They wait for CUDA before they read the clock, but only when CUDA is in use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from difflib import get_close_matches

from colossalai.utils.device import synchronize


class Timer:
    """A stopwatch that can keep a history of its laps."""

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """Seconds on a clock that only goes forward, after the device has finished its work."""
        synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Start, or start again: what ran since an earlier ``start`` is not counted."""
        self._started_at = self.current_time

    def lap(self) -> float:
        """Seconds since ``start``; the timer goes on."""
        if self._started_at is None:
            raise RuntimeError("this timer is not running; call start() before lap() or stop()")
        return self.current_time - self._started_at

    def stop(self, keep_in_history: bool = False) -> float:
        """Stop and return the seconds since ``start``."""
        self._elapsed = self.lap()
        self._started_at = None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """Seconds between the last ``start`` and its ``stop``."""
        return self._elapsed

    def get_history_mean(self) -> float:
        """The mean of the laps that were kept."""
        if not self._history:
            raise RuntimeError("this timer has no history; call stop(keep_in_history=True) first")
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """The sum of the laps that were kept."""
        return sum(self._history)

    def reset(self) -> None:
        """Forget everything; a running timer is stopped."""
        self._started_at = None
        self._elapsed = 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name.  One that is off costs nothing: ``start`` and ``stop`` return at once."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start the timer ``name``, made at its first start."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float:
        """Stop the timer ``name`` and return its seconds, 0 when the timers are off."""
        return self.get_timer(name).stop(keep_in_history) if self._on else 0.0

    def get_timer(self, name: str) -> Timer:
        """The timer ``name``, which must have been started once."""
        if name not in self._timers:
            close = get_close_matches(name, self._timers, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(self._timers) or 'none'}"
            )
            raise ValueError(f"no timer {name!r} was started; {hint}")
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Reset the timer ``name``, or all."""
        for timer in [self.get_timer(name)] if name is not None else self._timers.values():
            timer.reset()

    def is_on(self) -> bool:
        return self._on

    def set_status(self, mode: bool) -> None:
        """Switch the timers on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
