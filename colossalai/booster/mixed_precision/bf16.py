"""bf16 by autocast, with weights in fp32 or in bf16, and fp8 for the linear layers on top of it.

The range of bf16 is that of fp32, so gradients need no scaling.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp.autocast import AutocastModel, autocast_criterion, device_type_of
from colossalai.amp.casting import cast_model, is_batch_norm
from colossalai.amp.fp8 import ModuleFilter, check_device, is_no_head, swap_linears
from colossalai.amp.naive_amp import ConstantGradScaler, FP16Optimizer
from colossalai.booster.mixed_precision.base import Criterion, MixedPrecision
from colossalai.nn.optimizer.base import MultiTensorOptimizer


class BF16MixedPrecision(MixedPrecision):
    """Matrix products and convolutions in bf16; norms, softmax and losses in fp32, as autocast does.

    Args:
        half_weights: ``False``: weights, gradients and the optimizer in the model's own dtype.  ``True``:
            weights and gradients in bf16, and what bf16 lacks of the weights in the optimizer.  This is
            faster, and saves 2 to 4 bytes a parameter with our Adams.  Gradients are also added up in bf16,
            over micro-batches and over ranks. Batch norms stay as they are.
    """

    def __init__(self, half_weights: bool = False) -> None:
        if not isinstance(half_weights, bool):
            raise TypeError(
                f"BF16MixedPrecision needs half_weights to be True or False, got {half_weights!r}"
            )
        self.half_weights = half_weights

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, criterion: Criterion | None = None
    ) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
        device_type = device_type_of(model)
        if self.half_weights:
            optimizer = halve_weights(model, optimizer)
        if criterion is not None:
            criterion = autocast_criterion(criterion, device_type, torch.bfloat16)
        return AutocastModel(model, device_type, torch.bfloat16), optimizer, criterion


def halve_weights(model: nn.Module, optimizer: Optimizer | None) -> Optimizer | None:
    """Cast the weights to bf16, and see to it that ``optimizer`` steps fp32 ones."""
    values = cast_model(model, torch.bfloat16, keep=is_batch_norm)
    if optimizer is None or isinstance(optimizer, MultiTensorOptimizer):
        return optimizer  # ours keep what bf16 lacks themselves
    return FP16Optimizer(optimizer, ConstantGradScaler(1.0), master_values=values)


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
