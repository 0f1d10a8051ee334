"""From fp32 training objects to one of the levels of Apex."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.amp.apex_amp.optimizer import ApexAMPOptimizer
from colossalai.amp.apex_amp.options import ApexOptions, Properties
from colossalai.amp.autocast import AutocastModel, Criterion, autocast_criterion, device_type_of
from colossalai.amp.casting import CastModel, call_cast, cast_model, is_batch_norm
from colossalai.amp.naive_amp import BaseGradScaler, ConstantGradScaler, DynamicGradScaler
from colossalai.interface import ColossalaiOptimizer
from colossalai.nn.policies.wrap_forward import Forward, ForwardWrapper, wrap_forward


def apex_amp(
    model: nn.Module,
    optimizer: Optimizer | None,
    criterion: Criterion | None,
    options: ApexOptions,
    *,
    in_place: bool = False,
) -> tuple[nn.Module, Optimizer | None, Criterion | None]:
    """The three at ``options.opt_level``; with ``enabled=False`` nothing is scaled or cast.

    With ``in_place`` the model itself computes in the level from now on, as Apex does it, and its parameters
    keep their names inside other modules (``DistributedDataParallel``); otherwise a wrapper does.
    """
    if not options.enabled:
        return model, None if optimizer is None else ColossalaiOptimizer(optimizer), criterion
    properties = options.properties()
    exact: dict[Tensor, Tensor] = {}
    cast: tuple[torch.dtype | None, torch.dtype | None] = (None, options.cast_model_outputs)
    autocast = (device_type_of(model), torch.float16) if properties.patch_torch_functions else None
    if autocast is None and (dtype := properties.cast_model_type) is not None:
        keep = is_batch_norm if properties.keep_batchnorm_fp32 else lambda module: False
        exact = cast_model(model, dtype, keep)
        cast = (dtype, options.cast_model_outputs or torch.float32)
    if autocast is not None and criterion is not None:
        criterion = autocast_criterion(criterion, *autocast)
    if in_place and has_own_forward(model):
        wrap_forward(model, ApexForward)
        model.apex_amp = (autocast, cast)  # type: ignore[assignment]
    else:
        model = AutocastModel(model, *autocast) if autocast else model
        model = CastModel(model, *cast) if cast != (None, None) or not autocast else model
    if optimizer is not None:
        optimizer = ApexAMPOptimizer(
            optimizer,
            _scaler(properties, options),
            verbose=options.verbosity > 1,
            master_weights=bool(properties.master_weights),
            master_values=exact,
            report=options.verbosity > 0,
        )
    return model, optimizer, criterion


class ApexForward(ForwardWrapper):
    """A model that computes in a level of Apex without a wrapper around it."""

    apex_amp: tuple[tuple[str, torch.dtype] | None, tuple[torch.dtype | None, torch.dtype | None]]

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast, cast = self.apex_amp
        with torch.autocast(*autocast) if autocast else nullcontext():
            return call_cast(forward, args, kwargs, *cast)


def has_own_forward(model: nn.Module) -> bool:
    """Whether the forward of ``model`` is that of its class: not if it was compiled, scripted or replaced."""
    return "forward" not in vars(model) and not isinstance(model, torch.jit.ScriptModule)


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
