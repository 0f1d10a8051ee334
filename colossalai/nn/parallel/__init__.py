"""The documented place of Gemini's models; they live in ``colossalai.zero``, a layer above this one, and are
fetched when asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["GeminiDDP", "ZeroDDP", "zero_model_wrapper", "zero_optim_wrapper"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("colossalai.zero"), name)
