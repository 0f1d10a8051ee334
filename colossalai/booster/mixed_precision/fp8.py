"""fp8 matrix products in linear layers, bf16 elsewhere: the booster's front of ``colossalai.amp.fp8``."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.autocast import AutocastModel, autocast_criterion
from colossalai.amp.fp8 import ModuleFilter, check_device, is_no_head, swap_linears
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision


class FP8MixedPrecision(MixedPrecision):
    """Linear layers compute in fp8, everything else under autocast to bf16; weights and optimizer stay in fp32.

    It pays for wide layers and under ``torch.compile``, which joins the roundings with what is around them.

    Args:
        module_filter: which ``nn.Linear`` compute in fp8, given name and layer; by default all but heads.
    """

    def __init__(self, module_filter: ModuleFilter = is_no_head) -> None:
        self.module_filter = module_filter

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        check_device(device)
        swap_linears(model, self.module_filter)
        if criterion is not None:
            criterion = autocast_criterion(criterion, device.type, torch.bfloat16)
        return AutocastModel(model, device.type, torch.bfloat16), optimizer, criterion
