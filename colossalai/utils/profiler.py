"""``profile``: torch's profiler with the arguments of older scripts."""

from __future__ import annotations

import warnings
from typing import Any

import torch.profiler


class profile(torch.profiler.profile):
    """``torch.profiler.profile``.

    Args:
        engine: not needed; the profiler sees what runs.
        profile_stateful_tensor_memory: the memory that model data takes; where it lies is told by
            ``gemini`` (``model.timeline``), and this only warns.
        options: those of ``torch.profiler.profile``.
    """

    def __init__(
        self, *, engine: Any = None, profile_stateful_tensor_memory: bool = False, **options: Any
    ) -> None:
        if profile_stateful_tensor_memory:
            warnings.warn(
                "profile_stateful_tensor_memory=True has no effect: the profiler counts all memory"
                " (profile_memory=True), and report_memory_usage and Gemini's reports say what holds it",
                stacklevel=2,
            )
        super().__init__(**options)


__all__ = ["profile"]
