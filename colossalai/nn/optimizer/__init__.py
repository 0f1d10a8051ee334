"""Optimizers that update all parameters in a few kernel launches, on CPU and CUDA."""

from colossalai.nn.optimizer.adam import CPUAdam, FusedAdam, HybridAdam
from colossalai.nn.optimizer.large_batch import FusedLAMB, Lamb, Lars
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.nn.optimizer.sgd import FusedSGD

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb", "Lars", "NVMeOptimizer"]
