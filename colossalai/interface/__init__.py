"""The contract between training scripts, plugins and mixed precisions: boosted models, optimizers and schedulers."""

from colossalai.interface.lr_scheduler import LRSchedulerWrapper
from colossalai.interface.model import ModelWrapper
from colossalai.interface.optimizer import OptimizerWrapper

__all__ = ["LRSchedulerWrapper", "ModelWrapper", "OptimizerWrapper"]
