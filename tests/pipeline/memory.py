"""How much memory a function allocates, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def peak_bytes(function: Callable[[], Result]) -> tuple[Result, int]:
    """What ``function`` returns, and the most bytes of CPU tensors that were alive at once while it ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1)  # the profiler drops its first event
        result = function()
    events = profiler.profiler.kineto_results.events()
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return result, peak
