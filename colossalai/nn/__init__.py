"""What a training is made of: optimizers and learning-rate schedulers."""

from colossalai.nn import lr_scheduler, optimizer
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedLAMB, FusedSGD, HybridAdam, Lamb, Lars

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "HybridAdam",
    "Lamb",
    "Lars",
    "lr_scheduler",
    "optimizer",
]
