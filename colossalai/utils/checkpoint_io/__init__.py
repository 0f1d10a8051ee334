"""The documented place of checkpoints without a booster; they live in ``colossalai.checkpoint_io``, a layer
above this one, and are fetched when asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FUNCTIONS = "colossalai.checkpoint_io.runs.redistribution"
_METAS = "colossalai.checkpoint_io.runs.dist_meta"
_HOMES = {
    "save": _FUNCTIONS,
    "load": _FUNCTIONS,
    "merge": _FUNCTIONS,
    "redist": _FUNCTIONS,
    "ParamDistMeta": _METAS,
    "ParamRedistMeta": _METAS,
    "PipelineRedistMeta": _METAS,
    "RankRedistMeta": _METAS,
    "RedistMeta": _METAS,
}
__all__ = [
    "ParamDistMeta",
    "ParamRedistMeta",
    "PipelineRedistMeta",
    "RankRedistMeta",
    "RedistMeta",
    "load",
    "merge",
    "redist",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
