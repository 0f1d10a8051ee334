"""``profile``: torch's profiler, by the documented name."""

from __future__ import annotations

import warnings
from typing import Any

import torch.profiler


class profile(torch.profiler.profile):
    """``torch.profiler.profile``, which also takes the options of the documents.

    Args:
        engine: the engine that is profiled; torch's profiler sees all that the process does.
        profile_stateful_tensor_memory: warned of, since torch's own ``profile_memory`` counts every tensor,
            and ``gemini_manager.timeline`` of a Gemini model shows where its chunks are.
    """

    def __init__(
        self, *args: Any, engine: Any = None, profile_stateful_tensor_memory: bool = False, **kwargs: Any
    ) -> None:
        if profile_stateful_tensor_memory:
            warnings.warn(
                "profile_stateful_tensor_memory has no effect: profile_memory=True counts the memory of every"
                " tensor",
                stacklevel=2,
            )
        super().__init__(*args, **kwargs)
