"""Gradient handlers: how gradients are synchronized when torch's DDP does not do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.engine.gradient_handler.handlers import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)
from colossalai.mesh.parameter import SHARED_GROUP
from colossalai.registry import GRADIENT_HANDLER
from colossalai.utils.bucket import bucket_allreduce


def build_gradient_handler(
    config: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> BaseGradientHandler:
    """The handler that ``dict(type='MyGradientHandler', ...)`` describes; ``type`` is a registered name or a
    class.
    """
    options = dict(config)
    if "type" not in options:
        raise ValueError(f"a gradient handler needs a 'type', the name of its class; got {options!r}")
    kind = options.pop("type")
    handler = (GRADIENT_HANDLER.get_module(kind) if isinstance(kind, str) else kind)(
        model, optimizer, **options
    )
    if not isinstance(handler, BaseGradientHandler):
        raise TypeError(
            f"gradient handler {kind!r} must be a subclass of colossalai.engine.BaseGradientHandler, got"
            f" {type(handler).__name__}"
        )
    return handler


__all__ = [
    "SHARED_GROUP",
    "BaseGradientHandler",
    "DataParallelGradientHandler",
    "MoeGradientHandler",
    "PipelineSharedModuleGradientHandler",
    "SequenceParallelGradientHandler",
    "ZeROGradientHandler",
    "bucket_allreduce",
    "build_gradient_handler",
]
