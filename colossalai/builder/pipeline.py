"""Pipeline stages of a model that is given whole, or as a config."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from colossalai.builder.builder import build_from_registry
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.pipeline.partition import partition_balanced, partition_uniform
from colossalai.pipeline.pipelinable import PipelinableContext
from colossalai.pipeline.tied import check_shared_buffers, tie_stages
from colossalai.registry import MODELS

# The documented ways to cut a model, and the policies they are.
PARTITION_METHODS = {
    "layer": "uniform",
    "uniform": "uniform",
    "parameter": "balanced",
    "balanced": "balanced",
}


def build_pipeline_model(layers: nn.Sequential, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """This rank's stage of ``layers``, cut into equally many; with several chunks a ``ModuleList`` of stages.

    Layers keep their names, so the ``state_dict`` of a stage is a part of that of ``layers``.
    """
    if not isinstance(layers, nn.Sequential):
        raise TypeError(
            f"build_pipeline_model cuts an nn.Sequential, got {type(layers).__name__}; build other models"
            " inside of a colossalai.pipeline.PipelinableContext"
        )
    rank, size = _place()
    parts = partition_uniform(len(layers), size, num_chunks)
    named = [
        (name, m) for name, m in layers._modules.items() if m is not None
    ]  # one that is there twice runs twice
    check_shared_buffers([m for _, m in named], parts)
    tie_stages([m for _, m in named], [dict(m.named_parameters()) for _, m in named], parts, rank)
    chunks = [nn.Sequential(OrderedDict(named[start:end])) for start, end in parts[rank]]
    model = chunks[0] if num_chunks == 1 else nn.ModuleList(chunks)
    if verbose:
        _log(model, rank, size)
    return model


def build_pipeline_model_from_cfg(
    config: Mapping[str, Any], num_chunks: int = 1, partition_method: str = "parameter", verbose: bool = False
) -> nn.Module:
    """This rank's stage of the model that ``config``, with its class as ``type``, describes.

    ``partition_method`` is ``'layer'``, for equally many layers, or ``'parameter'``, for equally large
    stages.  The layers run in the order in which the model defines them.  Other stages take no memory here.
    """
    if partition_method not in PARTITION_METHODS:
        raise ValueError(
            f"partition_method must be one of {', '.join(PARTITION_METHODS)}, got {partition_method!r}"
        )
    rank, size = _place()
    with PipelinableContext(PARTITION_METHODS[partition_method]) as pipelinable:
        build_from_registry(config, MODELS)
    model = pipelinable.partition(num_chunks, size, rank)
    if verbose:
        _log(model, rank, size)
    return model


def _place() -> tuple[int, int]:
    """This pipeline rank, of how many."""
    if not gpc.is_initialized(ParallelMode.PIPELINE):
        return 0, 1
    return gpc.get_local_rank(ParallelMode.PIPELINE), gpc.get_world_size(ParallelMode.PIPELINE)


def _log(model: nn.Module, rank: int, size: int) -> None:
    count = sum(p.numel() for p in model.parameters())
    get_dist_logger().info(f"pipeline stage {rank} of {size}: {count} parameters\n{model}")


__all__ = [
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "partition_balanced",
    "partition_uniform",
]
