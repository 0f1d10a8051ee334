"""fp16 weights with fp32 masters in the optimizer."""

from colossalai.amp.naive_amp.fp16_optimizer import FP16Optimizer, NaiveAMPOptimizer
from colossalai.amp.naive_amp.grad_scaler import BaseGradScaler, ConstantGradScaler, DynamicGradScaler
from colossalai.amp.naive_amp.naive_amp_model import NaiveAMPModel

__all__ = [
    "BaseGradScaler",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP16Optimizer",
    "NaiveAMPModel",
    "NaiveAMPOptimizer",
]
