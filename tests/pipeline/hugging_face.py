"""What the tests of ``split_model`` share: a run of a Hugging Face model under a pipeline, for the parity
check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh.weights.deferred import Deferred, recording_in
from colossalai.pipeline import split_model
from colossalai.testing.parity import ParityError, Problem
from colossalai.testing.pipelined import PipelineRun
from tests.nn.policies import zoo
from tests.pipeline.plans import config, launch

STEPS = 2


def depth(name: str, blocks: int) -> dict[str, int]:
    if name == "t5":
        return {"num_layers": blocks // 2, "num_decoder_layers": blocks - blocks // 2}
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": blocks}


def batch(name: str, step: int) -> dict[str, Tensor]:
    """A batch of 24; as many labels in each part, so that the mean of the parts' losses is that of all."""
    parts = [zoo.batch(name, 6 * step + i) for i in range(6)]
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    if name != "vit":
        joined["labels"] = joined["labels"].masked_fill(joined["labels"] < 0, 5)
    return joined


def problem(name: str, blocks: int) -> Problem:
    task = Problem(
        build=lambda: zoo.build(name, **depth(name, blocks)),
        batches=[batch(name, step) for step in range(STEPS)],
        loss=lambda model, given: model(**given).loss,
    )
    # steps of the usual size multiply rounding errors of Gemma 2 by 10, also those of the serial model in
    # micro-batches
    return replace(task, optimizer=_small_steps) if name == "gemma2" else task


def _small_steps(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4)


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


class BoostedRun(StagedRun):
    """The same through ``Booster``; each batch is taken in two halves, whose gradients add up."""

    optimizer: Any = None  # its own, not that of an engine

    def __init__(self, task: Problem) -> None:
        model = split_model(task.build())
        self.names = {p: model.share.names[name][0] for name, p in model.named_parameters()}
        self.booster = colossalai.Booster()
        boosted = self.booster.boost(model, task.optimizer(model.parameters()))
        self.model, self.optimizer = boosted[0].train(), boosted[1]

    def forward_backward(self, batch: Any) -> Tensor:
        losses = []
        for half in range(2):
            data = iter([{key: value.chunk(2)[half] for key, value in batch.items()}])
            found = self.booster.execute_pipeline(data, self.model, None, self.optimizer)["loss"]
            losses.append(torch.zeros(()) if found is None else found)
        for p in self.names:
            p.grad.div_(2)
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss)  # zero but on the last stage
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def boosted_plan(task: Problem) -> BoostedRun:
    launch(config("1f1b", 2, 2))
    return BoostedRun(task)


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
    assert recording_in(model) is recording
    return StagedRun(Problem(build=lambda: model, batches=(), loss=task.loss), recording=recording)
