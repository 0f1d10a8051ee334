"""The documented place of the older interface of ZeRO-3.

It is a front of Gemini and lives in ``sharded_v2``.
"""

from colossalai.zero.shard_utils import BucketTensorShardStrategy, TensorShardStrategy
from colossalai.zero.sharded_v2 import (
    ShardedModelV2,
    ShardedOptimizerV2,
    ZeroInitContext,
    convert_to_zero_v2,
    no_shard_zero_context,
    no_shard_zero_decrator,
)

__all__ = [
    "BucketTensorShardStrategy",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroInitContext",
    "convert_to_zero_v2",
    "no_shard_zero_context",
    "no_shard_zero_decrator",
]
