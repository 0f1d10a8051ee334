"""The kinds of mixed precision that ``fp16 = dict(mode=...)`` in a config names."""

from __future__ import annotations

from enum import Enum


class AMP_TYPE(Enum):
    """The modes of ``convert_to_amp`` and of the section ``fp16`` of a config."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
