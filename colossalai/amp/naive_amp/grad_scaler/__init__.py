"""Loss scales: fixed and adaptive."""

from colossalai.amp.naive_amp.grad_scaler.base_grad_scaler import BaseGradScaler
from colossalai.amp.naive_amp.grad_scaler.constant_grad_scaler import ConstantGradScaler
from colossalai.amp.naive_amp.grad_scaler.dynamic_grad_scaler import DynamicGradScaler, dynamic_scaler

__all__ = ["BaseGradScaler", "ConstantGradScaler", "DynamicGradScaler", "dynamic_scaler"]
