"""The documented place of models with data parallelism; they live in layers above this one, and are fetched
when asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ColoDDP": "colossalai.booster.plugin.colo_ddp",
    "GeminiDDP": "colossalai.zero",
    "ZeroDDP": "colossalai.zero",
    "zero_model_wrapper": "colossalai.zero",
    "zero_optim_wrapper": "colossalai.zero",
}
__all__ = ["ColoDDP", "GeminiDDP", "ZeroDDP", "zero_model_wrapper", "zero_optim_wrapper"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
