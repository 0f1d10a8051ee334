"""Optimizers that update all parameters in a few kernel launches, on CPU and CUDA."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from colossalai.nn.optimizer.adam import CPUAdam, FusedAdam, HybridAdam
from colossalai.nn.optimizer.large_batch import FusedLAMB, Lamb, Lars
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.nn.optimizer.sgd import FusedSGD

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars", "NVMeOptimizer"]


# Documented as a part of this package, but built on what lies above it; loads on first use.
_ELSEWHERE = {"ColossalaiOptimizer": "colossalai.interface"}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
