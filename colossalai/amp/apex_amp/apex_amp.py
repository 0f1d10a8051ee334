"""From fp32 training objects to one of the levels of Apex."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

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
    level = _level_of(model, properties, options.cast_model_outputs)
    _check_once(model, level)
    exact: dict[Tensor, Tensor] = {}
    if (dtype := level.cast[0]) is not None:
        keep = is_batch_norm if properties.keep_batchnorm_fp32 else lambda module: False
        exact = cast_model(model, dtype, keep)
    if level.autocast is not None and criterion is not None:
        criterion = autocast_criterion(criterion, *level.autocast)
    model = _computes_in(model, level, in_place)
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


class CallLevel(NamedTuple):
    """How a model of a level is called."""

    autocast: tuple[str, torch.dtype] | None
    cast: tuple[torch.dtype | None, torch.dtype | None]  # of inputs and outputs


def _level_of(model: nn.Module, properties: Properties, output_type: torch.dtype | None) -> CallLevel:
    if properties.patch_torch_functions:
        return CallLevel((device_type_of(model), torch.float16), (None, output_type))
    dtype = properties.cast_model_type
    return CallLevel(None, (dtype, output_type if dtype is None else output_type or torch.float32))


class ApexForward(ForwardWrapper):
    """A model that computes in a level of Apex without a wrapper around it."""

    apex_amp: CallLevel

    def around(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        autocast, cast = self.apex_amp
        with torch.autocast(*autocast) if autocast else nullcontext():
            return call_cast(forward, args, kwargs, *cast)


def _check_once(model: nn.Module, level: CallLevel) -> None:
    before = getattr(model, "apex_amp", level)
    if isinstance(model, ApexForward) and before != level:
        raise ValueError(
            f"this {type(model).__name__} computes in a level of Apex already ({before}), and is to be"
            f" converted to another ({level}); convert a model once, or a second time with the same options"
            " for another optimizer"
        )


def _computes_in(model: nn.Module, level: CallLevel, in_place: bool) -> nn.Module:
    if isinstance(model, ApexForward):
        return model
    if in_place and has_own_forward(model):
        wrap_forward(model, ApexForward)
        model.apex_amp = level  # type: ignore[assignment]
        return model
    if level.autocast is not None:
        model = AutocastModel(model, *level.autocast)
        return model if level.cast == (None, None) else CastModel(model, *level.cast)
    return CastModel(model, *level.cast)


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
