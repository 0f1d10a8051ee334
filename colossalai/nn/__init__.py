"""What a training is made of: losses, metrics, optimizers and learning-rate schedulers."""

from colossalai.nn import loss, lr_scheduler, metric, optimizer
from colossalai.nn.loss import CrossEntropyLoss
from colossalai.nn.metric import Accuracy
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedLAMB, FusedSGD, HybridAdam, Lamb, Lars

__all__ = [
    "Accuracy",
    "CPUAdam",
    "CrossEntropyLoss",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "HybridAdam",
    "Lamb",
    "Lars",
    "loss",
    "lr_scheduler",
    "metric",
    "optimizer",
]
