"""From fp32 training objects to one of the levels of Apex."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp.apex_amp.options import ApexOptions, Properties
from colossalai.amp.autocast import AutocastModel, Criterion, autocast_criterion, device_type_of
from colossalai.amp.casting import CastModel, cast_model, is_batch_norm
from colossalai.amp.naive_amp import BaseGradScaler, ConstantGradScaler, DynamicGradScaler, FP16Optimizer
from colossalai.interface import ModelWrapper


def apex_amp(
    model: nn.Module, optimizer: Optimizer | None, criterion: Criterion | None, options: ApexOptions
) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
    """The three at ``options.opt_level``; with ``enabled=False``, as they are."""
    if not options.enabled:
        return model, optimizer, criterion
    properties = options.properties()
    exact: dict[Tensor, Tensor] = {}
    if properties.patch_torch_functions:
        device_type = device_type_of(model)
        amp_model: ModelWrapper = AutocastModel(model, device_type, torch.float16)
        if options.cast_model_outputs is not None:
            amp_model = CastModel(amp_model, None, options.cast_model_outputs)
        if criterion is not None:
            criterion = autocast_criterion(criterion, device_type, torch.float16)
    else:
        amp_model, exact = _cast(model, properties, options.cast_model_outputs)
    if optimizer is not None:
        optimizer = FP16Optimizer(
            optimizer,
            _scaler(properties, options),
            verbose=options.verbosity > 1,
            master_weights=bool(properties.master_weights),
            master_values=exact,
            report=options.verbosity > 0,
        )
    return amp_model, optimizer, criterion


def _cast(
    model: nn.Module, properties: Properties, output_type: torch.dtype | None
) -> tuple[CastModel, dict[Tensor, Tensor]]:
    dtype = properties.cast_model_type
    if dtype is None:
        return CastModel(model, None, output_type), {}
    keep = is_batch_norm if properties.keep_batchnorm_fp32 else lambda module: False
    exact = cast_model(model, dtype, keep)
    return CastModel(model, dtype, output_type or torch.float32), exact


def _scaler(properties: Properties, options: ApexOptions) -> BaseGradScaler:
    if properties.loss_scale != "dynamic":
        return ConstantGradScaler(properties.loss_scale)
    low, high = options.min_loss_scale, options.max_loss_scale
    first = max(min(2.0**16, high or 2.0**16), low or 0.0)
    return DynamicGradScaler(
        first,
        growth_interval=2000,
        min_scale=low,
        max_scale=high,
        hysteresis=1,
        verbose=options.verbosity > 1,
    )
