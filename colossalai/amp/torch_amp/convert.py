"""From fp32 training objects to torch AMP, in fp16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.autocast import Criterion, autocast_criterion, device_type_of
from colossalai.amp.torch_amp._grad_scaler import GradScaler, check_options
from colossalai.amp.torch_amp.torch_amp import TorchAMPModel, TorchAMPOptimizer


@dataclass(frozen=True, kw_only=True)
class TorchOptions:
    """The documented keys of ``fp16 = dict(mode=AMP_TYPE.TORCH, ...)``."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        check_options(self.init_scale, self.growth_factor, self.backoff_factor, self.growth_interval)


def torch_amp(
    model: nn.Module, optimizer: Optimizer | None, criterion: Criterion | None, options: TorchOptions
) -> tuple[TorchAMPModel, TorchAMPOptimizer | None, Criterion | None]:
    """``model`` and ``criterion`` under autocast, and ``optimizer`` with a ``GradScaler``."""
    device_type = device_type_of(model)
    if criterion is not None:
        criterion = autocast_criterion(criterion, device_type, torch.float16)
    if optimizer is None:
        return TorchAMPModel(model), None, criterion
    scaler = GradScaler(
        options.init_scale,
        options.growth_factor,
        options.backoff_factor,
        options.growth_interval,
        options.enabled,
        device=device_type,
    )
    return TorchAMPModel(model), TorchAMPOptimizer(optimizer, scaler), criterion
