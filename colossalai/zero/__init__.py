"""ZeRO: optimizer states and more cut over data-parallel ranks; and the documented place of ``ColoInitContext``."""

from colossalai.tensor import ColoInitContext, post_process_colo_init_ctx
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.wrapper import zero_model_wrapper, zero_optim_wrapper

__all__ = [
    "ColoInitContext",
    "LowLevelZeroOptimizer",
    "post_process_colo_init_ctx",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]
