"""``zero_model_wrapper`` and ``zero_optim_wrapper``: ZeRO of a stage, without a booster."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai.interface import OptimizerWrapper
from colossalai.interface.foreign_parameters import strangers
from colossalai.utils.parallel import averaging_group
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.renormalizing import renormalizing_on

# The attribute of a model that tells ``zero_optim_wrapper`` its stage.
STAGE = "_colo_zero_stage"


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None, verbose: bool = False
) -> nn.Module:
    """Prepare ``model`` for ZeRO of ``zero_stage``; give what is returned to ``zero_optim_wrapper``.

    Stages 1 and 2 leave the model as it is: all they do is done by the optimizer.  For stage 3
    it becomes a ``GeminiDDP``; ``gemini_config`` holds the arguments of that.
    """
    if zero_stage not in (1, 2, 3):
        raise ValueError(
            f"zero_model_wrapper knows the ZeRO stages 1, 2 and 3, got zero_stage={zero_stage!r}"
        )
    if zero_stage == 3:
        wrapped = GeminiDDP(model, **{"verbose": verbose, **(gemini_config or {})})
        setattr(wrapped, STAGE, zero_stage)
        return wrapped
    if gemini_config:
        raise ValueError(
            f"zero_model_wrapper takes a gemini_config for stage 3 only, got one for stage {zero_stage}"
        )
    group = averaging_group()
    if group is not None and (problem := renormalizing_on(dist.get_world_size(group), model)) is not None:
        raise ValueError(problem)
    setattr(model, STAGE, zero_stage)
    return model


def zero_optim_wrapper(
    model: nn.Module,
    optimizer: Optimizer,
    initial_scale: float = 2**16,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1,
    max_scale: float = 2**32,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    optim_config: dict[str, Any] | None = None,
    verbose: bool = False,
) -> OptimizerWrapper:
    """The optimizer of a model that ``zero_model_wrapper`` prepared.

    ``optim_config`` holds further arguments of ``LowLevelZeroOptimizer``, such as ``cpu_offload`` and
    ``reduce_bucket_size``, or for stage 3 of ``GeminiOptimizer``.
    """
    stage = getattr(model, STAGE, None)
    if stage is None:
        raise ValueError(
            "zero_optim_wrapper needs the model that zero_model_wrapper returned; call that first"
        )
    options = dict(optim_config or {})
    scale: dict[str, Any] = {
        "initial_scale": initial_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "hysteresis": hysteresis,
        "min_scale": min_scale,
        "max_scale": max_scale,
        "norm_type": norm_type,
        "verbose": verbose,
    }
    if isinstance(model, GeminiDDP):
        return GeminiOptimizer(optimizer, model, clipping_norm=max_norm, **scale, **options)
    if (problem := strangers(optimizer, model).problem()) is not None:
        raise ValueError(problem)
    if "partition_grad" in options:
        raise ValueError(
            f"zero_optim_wrapper sets partition_grad by the stage of the model ({stage}); leave it out of"
            " optim_config"
        )
    return LowLevelZeroOptimizer(
        optimizer, clip_grad_norm=max_norm, partition_grad=stage == 2, **scale, **options
    )
