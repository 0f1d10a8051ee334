"""The pipeline engines of older scripts that were driven over RPC, as fronts of our own executor.

There are no RPC workers: as everywhere in this package, every rank of a launched job runs the script, builds
its engine and takes part in each batch.  What the engines compute is the same; a script whose first rank
alone drives the others is refused with words when it builds an engine without a launch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.interface.batch import Criterion, DataProcess, split_batch
from colossalai.interface.nest import to_device
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.stage import Placement
from colossalai.pipeline.tied import synchronized_gradients
from colossalai.utils import checkpoint as checkpointed
from colossalai.utils import get_current_device
from colossalai.utils.parallel import share_weights

PartitionFunction = Callable[[int, int, int], nn.Module]


class PipelineResult(NamedTuple):
    """What a batch gave on the rank with the last layers; all None on the other ranks."""

    output: Any
    loss: Tensor | None
    metric: Any


class PipelineEngine:
    """Trains a pipeline of ``stage_num`` ranks; every rank of the job builds it.

    Args:
        partition_fn: called as ``partition_fn(pp_rank, chunk, stage_num)`` for each part of the model that
            this rank holds, it returns that part: ``pp_rank`` is its number among all ``stage_num * chunk``
            parts, which are the ``stage_num`` of the call.
        stage_num: how many ranks the pipeline has, as ``parallel=dict(pipeline=...)`` of the launch says.
        num_microbatches: how many parts of equal size a batch is cut into.
        device: where the parts are put.
        chunk: how many parts each rank holds.
        criterion: makes the loss of output and labels; without one, the output is the loss.
        metric: called with the output and the labels of a batch that has some, for the report.
        checkpoint: keep only the inputs of each part, and run it again in the backward pass.
        data_process_func: turns what ``forward_backward`` gets into ``(data, label)``.
    """

    schedules = ("1f1b", "interleaved")  # with one chunk, and with several
    notice: str | None = None  # what is done otherwise than the name says

    def __init__(
        self,
        partition_fn: PartitionFunction,
        stage_num: int,
        num_microbatches: int,
        device: str | torch.device,
        chunk: int = 1,
        criterion: Criterion | None = None,
        metric: Callable[[Any, Any], Any] | None = None,
        checkpoint: bool = False,
        data_process_func: DataProcess | None = None,
    ) -> None:
        if self.notice is not None:
            warnings.warn(self.notice, stacklevel=2)
        self._check_launch(stage_num)
        self._check_chunk(chunk)
        schedule = self.schedules[chunk > 1]
        placement = Placement(stage_num, chunk)
        rank = gpc.get_local_rank(ParallelMode.PIPELINE)
        numbers = [placement.stage(rank, i) for i in range(chunk)]
        parts = [partition_fn(number, chunk, placement.stages) for number in numbers]
        for part in parts:
            if not isinstance(part, nn.Module):
                raise TypeError(f"partition_fn must return a module, got {type(part).__name__}")
            if checkpoint:
                _recompute(part)
        model = with_chunks(nn.ModuleList(parts)) if chunk > 1 else parts[0]
        self.model = model.to(_own(device))
        self.criterion, self.metric = criterion, metric
        self.data_process_func = data_process_func
        self.optimizer: Optimizer | None = None
        share_weights(self.model)
        self.pipeline = Pipeline(self.model, gpc.mesh, schedule=schedule, microbatches=num_microbatches)

    def _check_chunk(self, chunk: int) -> None:
        if chunk < 1:
            raise ValueError(f"{type(self).__name__}: chunk is at least 1, got {chunk}")

    def _check_launch(self, stage_num: int) -> None:
        name = type(self).__name__
        if not gpc.is_initialized(ParallelMode.GLOBAL):
            raise RuntimeError(
                f"{name} needs a launched job: there are no RPC workers that the first rank could drive."
                f" Call colossalai.launch with parallel=dict(pipeline={stage_num}) on every rank, and build"
                " the engine on every rank"
            )
        if stage_num != (launched := gpc.get_world_size(ParallelMode.PIPELINE)):
            raise ValueError(
                f"{name} got stage_num={stage_num}, but the job was launched with {launched} pipeline"
                f" stage(s); launch with parallel=dict(pipeline={stage_num})"
            )

    def initialize_optimizer(self, optimizer_class: Callable[..., Optimizer], **kwargs: Any) -> None:
        """Make ``optimizer_class(parameters, **kwargs)`` on every rank; from now on each batch that trains
        ends with a step of it.
        """
        self.optimizer = optimizer_class(self.model.parameters(), **kwargs)

    def forward_backward(self, batch: Any, labels: Any = None, forward_only: bool = False) -> PipelineResult:
        """Take a batch through all stages, and back unless ``forward_only``; every rank passes the same
        batch.

        Without an optimizer, the gradients stay in the parameters, for the script.
        """
        given = batch if labels is None else (batch, labels)
        if labels is None and self.data_process_func is None:
            data, label = batch, None
        else:
            has_criterion = self.criterion is not None
            data, label = split_batch(given, self.data_process_func, has_criterion, type(self).__name__)
        device = next((p.device for p in self.model.parameters()), get_current_device())
        data, label = to_device(data, device), to_device(label, device)
        has_loss = not forward_only or (label is not None and self.criterion is not None)
        if forward_only:
            output, loss = self.pipeline.step(data, label, self.criterion, None, return_loss=has_loss)
        else:
            with synchronized_gradients(self.model.parameters(), gpc.mesh):
                output, loss = self.pipeline.step(data, label, self.criterion, self)
            if self.optimizer is not None:
                self.step()
        metric = None
        if self.metric is not None and label is not None and self.pipeline.has_loss:
            metric = self.metric(output, label)
        return PipelineResult(output, loss, metric)

    def step(self) -> None:
        """Let the optimizer of this rank step, and clear the gradients."""
        if self.optimizer is None:
            raise RuntimeError(f"{type(self).__name__} has no optimizer; call initialize_optimizer first")
        self.optimizer.step()
        self.optimizer.zero_grad()

    # What the pipeline calls

    def expect_gradients(self) -> None:
        """Called before the passes of a batch; nothing is to be prepared."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


class FillDrainPipelineEngine(PipelineEngine):
    """All forward passes of a batch, then all backward passes."""

    schedules = ("gpipe", "gpipe")


class OneFOneBPipelineEngine(PipelineEngine):
    """Forward and backward passes in turn, so that fewer micro-batches wait in memory."""


class ChimeraPipelineEngine(PipelineEngine):
    """Stands for pipelines in both directions at once, which hold every weight twice to wait less.

    It runs the zero-bubble schedule ZB-H1 instead, which waits less without a second copy, and gives the same
    results; a warning says so.
    """

    schedules = ("zbh1", "zbh1")

    notice = (
        "ChimeraPipelineEngine runs the zero-bubble schedule zbh1, in one direction and with one copy of the"
        " weights; the results are the same"
    )

    def _check_chunk(self, chunk: int) -> None:
        if chunk != 1:
            raise ValueError(
                f"ChimeraPipelineEngine has one chunk of the model on each rank, got chunk={chunk}; leave"
                " chunk=1, or use OneFOneBPipelineEngine, which interleaves several"
            )


def _own(device: str | torch.device) -> torch.device:
    """``device``, or this rank's own where only its kind is given."""
    wanted, current = torch.device(device), get_current_device()
    return current if wanted.index is None and wanted.type == current.type else wanted


def _recompute(part: nn.Module) -> None:
    """Let ``part`` keep its inputs only.  Its ``forward`` is replaced, so that names stay as they are."""
    forward = part.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpointed(functools.partial(forward, **kwargs), False, *args, use_reentrant=False)

    part.forward = recomputed
