"""The contract of boosted models, optimizers and schedulers under every plan, and of a loss."""

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
