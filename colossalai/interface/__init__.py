"""The contract between training scripts, plugins and mixed precisions: boosted models, optimizers and schedulers, and losses."""

from colossalai.interface.loss import LossWatch, check_differentiable, check_loss
from colossalai.interface.lr_scheduler import LRSchedulerWrapper
from colossalai.interface.model import ModelWrapper
from colossalai.interface.optimizer import OptimizerWrapper

__all__ = [
    "LRSchedulerWrapper",
    "LossWatch",
    "ModelWrapper",
    "OptimizerWrapper",
    "check_differentiable",
    "check_loss",
]
