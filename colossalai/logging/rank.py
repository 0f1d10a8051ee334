"""The rank of this process, as far as logging needs to know it.

Logging lies below the parallel context, so the context tells it how to find the rank within a parallel mode
(``set_rank_resolver``) instead of being imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

_resolver: Callable[[Any], int] | None = None


def set_rank_resolver(resolver: Callable[[Any], int] | None) -> None:
    """Tell the loggers how to find this process's rank within a parallel mode: ``resolver(parallel_mode)``.

    It is called only for a mode that was given; ``None`` restores the default, where every mode has the
    global rank.
    """
    global _resolver
    if resolver is not None and not callable(resolver):
        raise TypeError(f"the rank resolver must be a function of the parallel mode, got {resolver!r}")
    _resolver = resolver


def global_rank() -> int:
    """The rank in ``torch.distributed``; before that is initialized, what the launcher set; otherwise 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    for variable in _RANK_VARIABLES:
        if os.environ.get(variable, "").isdecimal():
            return int(os.environ[variable])
    return 0


def rank_in(parallel_mode: Any) -> int:
    """The rank of this process within ``parallel_mode``; ``None`` means all ranks of the job."""
    if parallel_mode is None or _resolver is None:
        return global_rank()
    return _resolver(parallel_mode)
