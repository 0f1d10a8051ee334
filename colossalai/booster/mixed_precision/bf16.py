"""bf16 by torch's autocast.  Its range is that of fp32, so gradients need no scaling."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.autocast import AutocastModel, autocast_criterion, device_type_of
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision


class BF16MixedPrecision(MixedPrecision):
    """Matrix products and convolutions in bf16; weights, gradients and the optimizer in the model's own dtype."""

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        device_type = device_type_of(model)
        if criterion is not None:
            criterion = autocast_criterion(criterion, device_type, torch.bfloat16)
        return AutocastModel(model, device_type, torch.bfloat16), optimizer, criterion
