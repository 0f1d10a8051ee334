"""The memory of one rank's training step, found by running the step itself on the meta device.

The model, the precision, the optimizer and the schedule are those that would train, and every tensor is
counted while it lives. What is not a tensor is not counted: CUDA's context, the buffers of NCCL, and the gaps
that the allocator cannot use.

A rank of a pipeline plays only a few micro-batches, with at most two of them stored at one time; each further
one that its schedule stores adds the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from colossalai.booster.mixed_precision.fp16 import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.dry_run.link import ImaginedLink, Way
from colossalai.dry_run.watch import MemoryEstimate, Watch, WatchedEngine, WatchedExecutor
from colossalai.engine.features import Features
from colossalai.engine.initialization import handlers_of, schedule_of_config
from colossalai.engine.schedule import PipelineSchedule
from colossalai.mesh import set_own_grad
from colossalai.nn.policies.cutting.experts import play_even_loads
from colossalai.pipeline.chunks import with_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.pipeline import Pipeline
from colossalai.pipeline.schedule import make_timetable
from colossalai.pipeline.schedule.base import Action, PassKind, Timetable
from colossalai.pipeline.stage import pipeline_rank
from colossalai.utils import is_using_pp
from colossalai.utils.meta import MetaBytes, gpu_kernels, step_as_on_gpu
from colossalai.utils.parallel import averaging_size, is_cut_over_rows

# A batch, as the data loader gives it: any nest of tensors with one row for each sample.
Batch = Any
AT_ONCE = 2


class PlayedStep(NamedTuple):
    """A step that was played: what was seen, and the bytes that only the config adds."""

    watch: Watch
    stored: int
    """Micro-batches that were stored at one time."""
    buckets: int

    def estimate(self, stored: int, with_step: bool = True) -> MemoryEstimate:
        """The memory of a rank that stores ``stored`` micro-batches at one time, in its passes and the
        optimizer's step.
        """
        more = (stored - self.stored) * self.watch.first_stored
        return replace(self.watch.estimate(more, with_step), buckets=self.buckets)


def estimate_memory(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Any] | None,
    batch: Batch,
    *,
    specs: dict[Way, Any] | None = None,
) -> MemoryEstimate:
    """What one training step of this rank needs; the step that counts is the second one.

    Needs a launch, real or imagined (``colossalai.context.fake_launch``), whose config says the precision,
    the schedule and so on, as ``initialize`` reads them.  ``model`` is this rank's model or stage, on the
    meta device, and ``batch`` the next batch of its data loader.  ``specs``: see ``ImaginedLink``; needed for
    all stages of a pipeline but the first.
    """
    return play_step(model, optimizer, criterion, batch, specs=specs).estimate(stored_microbatches())


def stored_microbatches() -> int:
    """How many micro-batches the schedule of the launched config stores on this rank at one time."""
    return 1 if not is_using_pp() else _timetable().peak_stored(pipeline_rank(gpc.mesh))


def played_alike() -> object:
    """Equal for two stages of the launched config whose short plays have the same actions."""
    if not is_using_pp():
        return None
    whole, rank = _timetable(), pipeline_rank(gpc.mesh)
    return rank if whole.placement.chunks > 1 else _short_timetable(whole, rank).ranks[rank]


def _timetable() -> Timetable:
    options = PipelineOptions.from_config(gpc.config, gpc.plan)
    return make_timetable(options.schedule, gpc.plan.pipeline, options.microbatches, options.chunks)


def play_step(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., Any] | None,
    batch: Batch,
    *,
    specs: dict[Way, Any] | None = None,
) -> PlayedStep:
    """``estimate_memory`` before the last step: what a stage with the same layers and another place needs
    follows from it.
    """
    _check_on_meta(model)
    play_even_loads(model, gpc.mesh)
    features = Features.from_config(gpc.config)
    watch = Watch(model)
    memory = MetaBytes(watch.at_peak)
    watch.memory = memory
    row: tuple[Action, ...] = ()
    stored = 1
    with gpu_kernels(), memory:
        memory.hold((*model.parameters(), *model.buffers()))
        engine = _engine(features, with_chunks(model), optimizer, criterion)
        engine.watch = watch
        if isinstance(engine.schedule, PipelineSchedule):
            pipeline = engine.schedule.pipeline
            link: Any = ImaginedLink(pipeline.rank, {} if specs is None else specs)
            pipeline.executor = executor = WatchedExecutor(link, pipeline)
            executor.watch = watch
            batch = _shorten(pipeline, batch)
            row, stored = (
                pipeline.timetable.ranks[pipeline.rank],
                pipeline.timetable.peak_stored(pipeline.rank),
            )
        _make_states(engine)
        watch.start(engine.optimizer, row)
        _step(engine, tree_map_only(Tensor, lambda t: t.to("meta"), batch))
    return PlayedStep(watch, stored, _buckets(features, model))


def _check_on_meta(model: nn.Module) -> None:
    real = next((name for name, p in model.named_parameters() if not p.is_meta), None)
    if real is not None:
        raise ValueError(
            f"estimate_memory needs a model on the meta device, but the parameter {real} has memory; build"
            " the model inside `with torch.device('meta')`"
        )


def _engine(features: Features, model: nn.Module, optimizer: Optimizer, criterion: Any) -> WatchedEngine:
    """What ``initialize`` makes of them, but on the meta device and without DDP."""
    ready: Any = (model, optimizer, criterion)
    played = (FP16NaiveMixedPrecision, FP16TorchMixedPrecision)
    if features.precision is not None and not isinstance(features.precision, played):
        raise ConfigException(
            "a dry run plays fp16 with AMP_TYPE.NAIVE or AMP_TYPE.TORCH, or no fp16; not the levels of Apex"
        )
    if features.precision is not None:
        ready = features.precision.configure(model, optimizer, criterion)
    model, optimizer, criterion = ready
    step_as_on_gpu(optimizer)
    handlers = handlers_of(features, model, optimizer)
    return WatchedEngine(
        model, optimizer, criterion, handlers, features.clip_grad_norm, None, False, schedule_of_config()
    )


def _shorten(pipeline: Pipeline, batch: Batch) -> Batch:
    """Give ``pipeline`` fewer micro-batches, and return the batch of these."""
    whole = pipeline.timetable
    if whole.placement.chunks > 1:
        return batch
    short = _short_timetable(whole, pipeline.rank)
    pipeline.timetable = short

    def rows(t: Tensor) -> Tensor:
        return t[: len(t) // whole.microbatches * short.microbatches]

    return tree_map_only(Tensor, rows, batch)


def _short_timetable(whole: Timetable, rank: int) -> Timetable:
    """At most ``AT_ONCE`` micro-batches stored at one time; gradients are there then if they are in
    ``whole``.
    """
    most = whole.peak_stored(rank)
    stored = min(most, AT_ONCE)
    # where all forward passes come first, there are no gradients yet when most is stored
    count = stored if most == whole.microbatches else min(whole.microbatches, 2 * stored)
    forward = [Action(PassKind.FORWARD, i) for i in range(count)]
    backward = [Action(PassKind.BACKWARD, i) for i in range(count)]
    row = forward[:stored]
    for i in range(count):
        row += [backward[i], *forward[stored + i : stored + i + 1]]
    return Timetable(whole.name, whole.placement, count, (tuple(row),) * whole.placement.ranks)


def _make_states(engine: WatchedEngine) -> None:
    """A step with any gradients, after which the optimizer has its states."""
    for p in engine.model.parameters():
        if p.requires_grad:
            set_own_grad(p, torch.empty_like(p))
    engine.optimizer.expect_gradients()
    engine.step()
    engine.zero_grad()


def _step(engine: WatchedEngine, batch: Batch) -> None:
    engine.execute_schedule(iter([batch]), return_output_label=False)
    engine.watch.before_step()
    engine.step()


def _buckets(features: Features, model: nn.Module) -> int:
    """What DDP adds, which averages the gradients of a model without a pipeline; those of experts are
    averaged after it, few at a time.
    """
    alone = gpc.pipeline_parallel_size == 1 and averaging_size() > 1 and not features.handlers
    if not alone or features.ddp_options.get("gradient_as_bucket_view"):
        return 0
    return sum(p.nbytes for p in model.parameters() if p.requires_grad and not is_cut_over_rows(p))
