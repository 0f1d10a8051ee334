"""The kinds of mixed precision that ``fp16 = dict(mode=...)`` in a config names."""

from __future__ import annotations

from enum import Enum


class AMP_TYPE(Enum):
    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
