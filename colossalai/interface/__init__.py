"""What boosted models, optimizers and schedulers promise, whatever plan stands behind them, and what a loss
must be.
"""

from colossalai.interface.holding import Holding
from colossalai.interface.loss import LossWatch, check_differentiable, check_loss
from colossalai.interface.lr_scheduler import LRSchedulerWrapper
from colossalai.interface.model import ModelWrapper, below_compile, user_module
from colossalai.interface.optimizer import ColossalaiOptimizer, OptimizerWrapper

__all__ = [
    "ColossalaiOptimizer",
    "Holding",
    "LRSchedulerWrapper",
    "LossWatch",
    "ModelWrapper",
    "OptimizerWrapper",
    "below_compile",
    "check_differentiable",
    "check_loss",
    "user_module",
]
