"""A model that a page splits by hand into pipeline stages, in the parity check: it must equal its serial
form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import placement, serial_form, shard
from colossalai.pipeline.partition import partition_uniform
from colossalai.testing.parity import Problem
from colossalai.testing.pipelined import PipelineRun

# How the page's names of a chunk that begins at a block become those of the serial model.
Rename = Callable[[str, int], str]


class HandSplitRun(PipelineRun):
    """The page's chunks with the weights of the serial model, under the launched config."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        rename: Rename,
        depth: int,
        criterion: Callable[..., Tensor],
    ) -> None:
        chunks: list[Any] = list(model) if isinstance(model, nn.ModuleList) else [model]
        rank, size = gpc.get_local_rank(ParallelMode.PIPELINE), gpc.pipeline_parallel_size
        parts = partition_uniform(depth, size, len(chunks))[rank]
        self.names = {
            p: rename(name, start)
            for chunk, (start, _) in zip(chunks, parts, strict=True)
            for name, p in chunk.named_parameters()
        }
        values = dict(problem.build().named_parameters())
        with torch.no_grad():
            for p, name in self.names.items():
                p.copy_(shard(serial_form(values[name], p), placement(p), gpc.mesh))
        self.engine, *_ = colossalai.initialize(
            model, problem.optimizer(model.parameters()), criterion, verbose=False
        )
        self.engine.train()
