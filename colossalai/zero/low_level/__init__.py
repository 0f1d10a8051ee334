"""ZeRO stages 1 and 2."""

from colossalai.zero.low_level.optimizer import LowLevelZeroOptimizer

__all__ = ["LowLevelZeroOptimizer"]
