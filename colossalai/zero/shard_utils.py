"""The documented names of ways to cut weights over ranks.

Gemini has one way, even slices of chunks, which needs no choice.  Configs may
still name a strategy: it has no effect.
"""

from __future__ import annotations


class BaseShardStrategy:
    """A name that a config may hold as ``shard_strategy``."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class TensorShardStrategy(BaseShardStrategy):
    """Once: every tensor is cut by itself."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """Once: tensors are gathered several at a time, as chunks are."""


__all__ = ["BaseShardStrategy", "BucketTensorShardStrategy", "TensorShardStrategy"]
