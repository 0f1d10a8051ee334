"""What a boosted model and a boosted optimizer promise, whatever plugin stands behind them."""

from colossalai.interface.model import ModelWrapper
from colossalai.interface.optimizer import OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper"]
