"""A transformer of this zoo as pipeline stages: a stage is a range of the blocks of the one model.

The model is built without memory, and the layers of this rank's stages are filled with the serial model's
values (:mod:`colossalai.mesh.weights.deferred`).  A stage keeps the names of the model's layers, so its
``state_dict`` is a part of the model's, and runs them with the model's own ``run_layers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.mesh.weights.deferred import Deferred
from colossalai.nn.layer.wrapper import PipelineSharedModuleWrapper
from colossalai.pipeline.partition import StageRanges, partition_uniform
from colossalai.pipeline.stage import Placement, launched_shape
from colossalai.utils import get_current_device


class Stage(nn.Module):
    """The blocks from ``start`` to ``end`` of a model; with its embedding, norm and head where these
    belong.
    """

    def __init__(self, model: Any, start: int, end: int) -> None:
        super().__init__()
        first, last = start == 0, end == len(model.blocks)
        self.place, self.sequence = model.place, model.sequence
        self.embed = model.embed if first else None
        # under the numbers that they have in the whole model
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(start, end)})
        self.norm = model.norm if last and hasattr(model, "norm") else None
        self.head = model.head if last else None


def build_pipeline(
    build: Callable[[], nn.Module],
    stage: Callable[[nn.Module, int, int], Stage],
    depth: int,
    num_chunks: int = 1,
    device: torch.device | None = None,
) -> nn.Module:
    """This rank's stage of the model that ``build`` makes, or a ``ModuleList`` of one for each chunk.

    The model has ``depth`` blocks.  Where the job has no pipeline, the stages of one rank are the model.
    """
    piped = gpc.is_initialized(ParallelMode.PIPELINE)
    size = gpc.get_world_size(ParallelMode.PIPELINE) if piped else 1
    rank = gpc.get_local_rank(ParallelMode.PIPELINE) if piped else 0
    all_parts = partition_uniform(depth, size, num_chunks)
    real = torch.get_default_device().type != "meta"
    if real:
        with Deferred() as recording:
            model = build()
    else:
        model = build()
    _refuse_shared_blocks(model, all_parts)
    chunks = []
    for start, end in all_parts[rank]:
        if piped:
            get_dist_logger().info(
                f"Rank{gpc.get_global_rank()} build layer {start}-{end}, {end - start}/{depth} layers"
            )
        chunks.append(stage(model, start, end))
    stages = chunks[0] if num_chunks == 1 else nn.ModuleList(chunks)
    if real:
        recording.materialize(stages).to(device or get_current_device())
    return stages


def _refuse_shared_blocks(model: Any, parts: StageRanges) -> None:
    """Each rank would train its own copy of what blocks of several ranks share."""
    holders: dict[int, set[int]] = {}
    for rank, ranges in enumerate(parts):
        for p in (p for r in ranges for i in range(*r) for p in model.blocks[i].parameters()):
            holders.setdefault(id(p), set()).add(rank)
    if any(len(ranks) > 1 for ranks in holders.values()):
        raise ValueError(
            f"the blocks of {type(model).__name__} share parameters, which stages of different ranks cannot;"
            " use parallel.pipeline=1, with other axes (data, moe, tensor, sequence)"
        )


def share_table(stages: nn.Module) -> None:
    """Tie the table of the first stage's embedding and the weight of the last stage's head, if other ranks
    hold it.
    """
    if not gpc.is_initialized(ParallelMode.PIPELINE):
        return
    last = Placement(gpc.get_world_size(ParallelMode.PIPELINE), 2, launched_shape()).loss_rank
    if last == 0:  # of one stage, or of a V: the model itself ties them
        return
    wrapper = PipelineSharedModuleWrapper([0, last])
    for part in stages.modules():
        if isinstance(part, Stage) and part.embed is not None:
            wrapper.register_parameter(part.embed.word_embeddings.weight)
        if isinstance(part, Stage) and part.head is not None:
            wrapper.register_parameter(part.head.dense.weight)
