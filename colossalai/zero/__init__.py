"""ZeRO: optimizer states and more cut over data-parallel ranks.

And the documented place of ``ColoInitContext``.
"""

from colossalai.tensor import ColoInitContext, post_process_colo_init_ctx
from colossalai.zero.gemini import (
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    ZeroDDP,
    ZeroOptimizer,
    get_static_torch_model,
)
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.shard_utils import BucketTensorShardStrategy, TensorShardStrategy
from colossalai.zero.sharded_v2 import (
    ShardedModelV2,
    ShardedOptimizerV2,
    ZeroInitContext,
    convert_to_zero_v2,
)
from colossalai.zero.wrapper import zero_model_wrapper, zero_optim_wrapper

__all__ = [
    "BucketTensorShardStrategy",
    "ColoInitContext",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiOptimizer",
    "LowLevelZeroOptimizer",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroDDP",
    "ZeroInitContext",
    "ZeroOptimizer",
    "convert_to_zero_v2",
    "get_static_torch_model",
    "post_process_colo_init_ctx",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]
