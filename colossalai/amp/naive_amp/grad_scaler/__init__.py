"""Loss scales: fixed and adaptive."""

from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import BaseGradScaler
from colossalai.amp.naive_amp.grad_scaler.constant_grad_scaler import ConstantGradScaler
from colossalai.amp.naive_amp.grad_scaler.dynamic_grad_scaler import DynamicGradScaler

__all__ = ["BaseGradScaler", "ConstantGradScaler", "DynamicGradScaler"]
