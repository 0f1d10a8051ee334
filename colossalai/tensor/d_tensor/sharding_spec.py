"""``ShardingSpec`` of distributed tensors: ``ShardingSpec(dim_size, ...)``."""

from colossalai.tensor.sharding_spec import (
    ALLGATHER_COST,
    SHARD_COST,
    STEP_PENALTY,
    DuplicatedShardingDimensionError,
    ShardingNotDivisibleError,
    ShardingOutOfIndexError,
    ShardingSpec,
    ShardingSpecException,
)

__all__ = [
    "ALLGATHER_COST",
    "SHARD_COST",
    "STEP_PENALTY",
    "DuplicatedShardingDimensionError",
    "ShardingNotDivisibleError",
    "ShardingOutOfIndexError",
    "ShardingSpec",
    "ShardingSpecException",
]
