"""fp8 matrix products in linear layers, bf16 elsewhere: the booster's front of ``colossalai.amp.fp8``."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.fp8 import ModuleFilter, check_device, is_no_head, swap_linears
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision
from colossalai.booster.mixed_precision.bf16 import BF16MixedPrecision


class FP8MixedPrecision(MixedPrecision):
    """Linear layers compute in fp8, everything else as ``BF16MixedPrecision`` does.

    It pays for wide layers and under ``torch.compile``, which joins the roundings with what is around them.

    Args:
        module_filter: which ``nn.Linear`` compute in fp8, given name and layer; by default all but heads.
        half_weights: see ``BF16MixedPrecision``.
    """

    def __init__(self, module_filter: ModuleFilter = is_no_head, half_weights: bool = False) -> None:
        self.module_filter = module_filter
        self._rest = BF16MixedPrecision(half_weights)

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        check_device(device)
        swap_linears(model, self.module_filter)
        return self._rest.configure(model, optimizer, criterion)
