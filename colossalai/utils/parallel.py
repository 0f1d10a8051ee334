"""Questions about this rank's place in the parallel plan.  Before a launch the answers are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from colossalai.constants import IS_TENSOR_PARALLEL
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc


def is_dp_rank_0() -> bool:
    """Whether this is the first rank of its data-parallel group."""
    return not gpc.is_initialized(ParallelMode.DATA) or gpc.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Whether this is the first rank of its tensor-parallel group."""
    return not gpc.is_initialized(ParallelMode.TENSOR) or gpc.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Whether the loss is computed here: there is no pipeline, or this is its last stage."""
    return not gpc.is_initialized(ParallelMode.PIPELINE) or gpc.is_last_rank(ParallelMode.PIPELINE)


def is_using_ddp() -> bool:
    """Whether there is more than one data-parallel rank."""
    return _is_using(ParallelMode.DATA)


def is_using_pp() -> bool:
    """Whether there is more than one pipeline stage."""
    return _is_using(ParallelMode.PIPELINE)


def is_using_sequence() -> bool:
    """Whether sequences are divided over ranks (``mode='sequence'``)."""
    return _is_using(ParallelMode.SEQUENCE)


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Whether ``param`` is one piece of a parameter that is divided over tensor-parallel ranks."""
    return bool(getattr(param, IS_TENSOR_PARALLEL, False))


def is_ddp_ignored(param: torch.Tensor) -> bool:
    """Whether data parallelism leaves ``param`` alone (its attribute ``_ddp_to_ignore``)."""
    return bool(getattr(param, "_ddp_to_ignore", False))


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode) -> None:
    """Give all ranks of ``parallel_mode`` the parameters of its first rank."""
    if not _is_using(parallel_mode):
        return
    first = gpc.get_ranks_in_group(parallel_mode)[0]
    with torch.no_grad():
        for param in model.parameters():
            dist.broadcast(param, src=first, group=gpc.get_group(parallel_mode))


@contextmanager
def switch_virtual_pipeline_parallel_rank(rank: int | None) -> Iterator[None]:
    """Be virtual pipeline rank ``rank`` inside the block."""
    previous = gpc.virtual_pipeline_parallel_rank
    gpc.set_virtual_pipeline_parallel_rank(rank)
    try:
        yield
    finally:
        gpc.set_virtual_pipeline_parallel_rank(previous)


def _is_using(parallel_mode: ParallelMode) -> bool:
    return gpc.is_initialized(parallel_mode) and gpc.get_world_size(parallel_mode) > 1
