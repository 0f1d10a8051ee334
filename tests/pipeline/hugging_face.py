"""What the tests of ``split_model`` share: a run of a Hugging Face model under a pipeline, for the parity check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh.deferred import Deferred
from colossalai.pipeline import split_model
from colossalai.testing.parity import ParityError, Problem
from colossalai.testing.pipelined import PipelineRun
from tests.nn.policies import zoo
from tests.pipeline.plans import config, launch

STEPS = 3


def depth(name: str, blocks: int) -> dict[str, int]:
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": blocks}


def batch(name: str, step: int) -> dict[str, Tensor]:
    """A batch of 8; as many labels in each part, so that the mean of the parts' losses is that of all."""
    halves = [zoo.batch(name, 2 * step + i) for i in range(2)]
    joined = {key: torch.cat([half[key] for half in halves]) for key in halves[0]}
    if name != "vit":
        joined["labels"] = joined["labels"].masked_fill(joined["labels"] < 0, 5)
    return joined


def problem(name: str, blocks: int) -> Problem:
    return Problem(
        build=lambda: zoo.build(name, **depth(name, blocks)),
        batches=[batch(name, step) for step in range(STEPS)],
        loss=lambda model, given: model(**given).loss,
    )


class StagedRun(PipelineRun):
    """A problem whose model is one of Hugging Face, split over the pipeline of the launched job."""

    def __init__(self, task: Problem, criterion: Callable[..., Tensor] | None = None, **options: Any) -> None:
        model = split_model(task.build(), **options)
        stages = list(model) if isinstance(model, nn.ModuleList) else [model]
        # tied weights have one name in the serial model
        self.names = {p: s.share.names[name][0] for s in stages for name, p in s.named_parameters()}
        self.engine, *_ = colossalai.initialize(
            model, task.optimizer(model.parameters()), criterion, verbose=False
        )
        self.engine.train()

    def _everywhere(self, items: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        own = {name: tensor.cpu() for name, tensor in items}
        parts: list[Any] = [None] * gpc.pipeline_parallel_size
        dist.all_gather_object(parts, own, group=gpc.get_cpu_group(ParallelMode.PIPELINE))
        found: dict[str, Tensor] = {}
        for name, tensor in (item for part in parts for item in part.items()):
            if not torch.equal(found.setdefault(name, tensor), tensor):
                raise ParityError(f"the stages that share {name!r} differ")
        return found


def plan(
    task: Problem,
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    tensor: dict[str, Any] | None = None,
    **options: Any,
) -> StagedRun:
    settings = config(schedule, stages, microbatches, chunks)
    if tensor is not None:
        settings["parallel"]["tensor"] = tensor
    launch(settings)
    return StagedRun(task, **options)


def deferred_plan(task: Problem, tensor: dict[str, Any] | None = None) -> StagedRun:
    """The model is built without memory, and each rank fills its own stage."""
    settings = config("1f1b", 2, 2)
    if tensor is not None:
        settings["parallel"]["tensor"] = tensor
    launch(settings)
    recording = Deferred(large=64)
    with recording:
        model = task.build()
    assert any(p.is_meta for p in model.parameters())
    return StagedRun(Problem(build=lambda: model, batches=(), loss=task.loss), recording=recording)
