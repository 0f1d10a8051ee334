"""The choice of a job's communication backend."""

from __future__ import annotations

import torch
import torch.distributed as dist


def default_backend() -> str:
    """``nccl`` on a machine with CUDA, else ``gloo``."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def resolve_backend(backend: str | None) -> str:
    """The backend string for ``init_process_group``: one that carries CPU tensors in every case.

    ``None`` takes the default.  ``nccl`` brings gloo along for CPU tensors, so one group serves both devices.
    """
    backend = default_backend() if backend is None else backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be 'nccl', 'gloo' or None, got {type(backend).__name__} {backend!r}")
    name = backend.lower()
    if "nccl" in name and not torch.cuda.is_available():
        raise RuntimeError(
            f"backend {backend!r} needs CUDA, and torch finds no CUDA device here; use backend='gloo', or"
            " leave the backend out to have it chosen"
        )
    for part in name.split(","):
        if not dist.is_backend_available(part.rpartition(":")[2]):
            raise ValueError(f"torch has no backend {part!r} here; use 'gloo' or, with CUDA, 'nccl'")
    if "nccl" in name and "cpu:" not in name:
        return "cpu:gloo,cuda:nccl"
    return name
