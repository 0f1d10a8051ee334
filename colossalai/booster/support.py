"""Refuses combinations of model, optimizer, plugin and pipeline that cannot be trained.

``initialize`` asks before it builds anything, ``Booster`` in ``boost`` and before the first step of a
pipeline, and a dry run for every rank that it plays.  So all of them refuse the same, in the same words.
Which precisions a plugin takes it says itself (``Plugin.supported_precisions`` and ``take_precision``); what
concerns one part alone is refused where that part is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.booster.plugin.dp import DPPluginBase
from colossalai.booster.plugin.half_weight_plugin import HalfWeightPlugin
from colossalai.core import global_context as gpc
from colossalai.interface import OptimizerWrapper, user_module
from colossalai.interface.foreign_parameters import strangers
from colossalai.mesh import DATA_AXIS, PIPELINE_AXIS, placement
from colossalai.mesh.gradient_norm import tensor_axes
from colossalai.mesh.parameter import model_mesh, overlapping
from colossalai.nn.policies.stages.stage import adapted_too_late, wrapped_elsewhere
from colossalai.pipeline.chunks import count_chunks
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.pipeline import split_problem
from colossalai.pipeline.schedule import make_timetable
from colossalai.tensor import ColoTensor
from colossalai.tensor.colo_tensor import cut_dim
from colossalai.utils import is_using_pp, is_using_sequence
from colossalai.utils.parallel import (
    cut_over_rows,
    first_problem,
    is_ddp_ignored,
    launched_mesh,
    mesh_of_model,
    row_mode,
)
from colossalai.zero.pieces import is_elementwise, or_say_so, whole_parameters_problem
from colossalai.zero.renormalizing import renormalizing, renormalizing_on

# ---- Which optimizers can step the part of a model that a rank holds ----

# Of torch's own.
OF_WHOLE_MODELS = ("LBFGS",)  # takes products of all gradients
OF_PLAIN_TENSORS = ("Rprop",)


def reach_problem(optimizer: Optimizer, kind: type[Plugin] | None, shares_model: bool) -> str | None:
    """Why ``optimizer`` looks at more of the model than this rank holds, and would step each part in another
    direction; None if not.

    Args:
        kind: the class of the plugin.
        shares_model: whether several ranks hold one model together, by tensor or pipeline parallelism.
    """
    raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
    name = next((c.__name__ for c in type(raw).__mro__ if c.__module__.startswith("torch.optim")), "")
    problem = None
    if name in OF_WHOLE_MODELS and (shares_model or (kind is not None and issubclass(kind, TorchFSDPPlugin))):
        problem = "looks at the gradients of the whole model at once, of which each rank holds a part"
    elif name in OF_PLAIN_TENSORS and kind is not None and issubclass(kind, TorchFSDPPlugin):
        problem = (
            "writes to elements that it chooses, which torch cannot do with the DTensors of TorchFSDPPlugin"
        )
    elif not is_elementwise(raw):  # Adafactor, Muon, LAMB, or what a script has written itself
        cut = [p for group in raw.param_groups for p in group["params"] if placement(p).sharded]
        if cut:
            shape = tuple(cut[0].shape)
            problem = (
                f"may look at whole matrices, but the parallel plan has cut some (a piece here: {shape})"
            )
    if problem is None:
        return None
    remedy = f"use an optimizer that works element by element, such as AdamW{or_say_so(raw)}"
    return f"{type(raw).__name__} {problem}; {remedy}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The class and options of a plugin, which a dry run knows without building it."""

    kind: type[Plugin]
    replicas: int = 1
    """How many ranks it divides and averages over."""
    updates_early: bool = False
    """Whether it updates weights for good in the backward pass."""
    ranks: frozenset[int] | None = None
    """Those it divides and averages over; None for those of the launched job with the same weights."""

    @classmethod
    def of(cls, plugin: Plugin) -> Plan:
        if not isinstance(plugin, DPPluginBase):
            return cls(kind=type(plugin))
        early = isinstance(plugin, GeminiPlugin) and plugin.updates_early
        ranks = frozenset(plugin.divided_over())
        return cls(kind=type(plugin), replicas=len(ranks), updates_early=early, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The objects to train on this rank; ``pipeline`` is None where no schedule is known or needed."""

    model: nn.Module
    optimizer: Optimizer | None = None
    plan: Plan | None = None
    pipeline: PipelineOptions | None = None
    criterion: Any = None
    averaged_over: frozenset[int] = frozenset()
    """Ranks that are replicas although there is no plan, as those of gradient handlers."""


def check_supported(wanted: Wanted, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` for what cannot be trained.

    With a schedule, or a plan over several ranks, it raises on all ranks of the pipeline, which all call
    this: stages may differ.
    """
    problem, plan = problem_of(wanted), wanted.plan
    if wanted.pipeline is not None or (plan is not None and issubclass(plan.kind, DPPluginBase)):
        problem = first_problem(problem)
    if problem is not None:
        raise error(problem)


def shares_models() -> bool:
    """Whether several ranks of the launched job train one model together, also on one sequence or with its
    experts shared out; without a plugin, each rank is a job of its own if not.
    """
    mesh = launched_mesh()
    return mesh is not None and any(size > 1 for axis, size in mesh.size.items() if axis != DATA_AXIS)


def _holds_a_part(model: nn.Module) -> bool:
    mesh = mesh_of_model(user_module(model))
    return mesh is not None and any(
        mesh.size.get(axis, 1) > 1 for axis in (PIPELINE_AXIS, *tensor_axes(mesh))
    )


def problem_of(wanted: Wanted) -> str | None:
    """Why it cannot be trained, as far as this rank knows; None if it can."""
    return next((problem for check in CHECKS if (problem := check(wanted)) is not None), None)


def _chunks(wanted: Wanted) -> str | None:
    pipeline, found = wanted.pipeline, count_chunks(wanted.model)
    if pipeline is None or pipeline.chunks == found:
        return None
    return (
        f"the config asks for {pipeline.chunks} chunk(s) of the model on each rank of the pipeline, got"
        f" {found}; build the stages with the same number of chunks (NUM_CHUNKS, or model.num_chunks)"
    )


def _schedule(wanted: Wanted) -> str | None:
    pipeline, plan = wanted.pipeline, wanted.plan
    if pipeline is None or plan is None or not issubclass(plan.kind, DPPluginBase):
        return None
    kind: Any = plan.kind.model_type
    if not getattr(kind, "releases_weights", False):
        return None
    stages = max(gpc.pipeline_parallel_size, 1)
    timetable = make_timetable(pipeline.schedule, stages, pipeline.microbatches, pipeline.chunks)
    return split_problem(timetable, kind.__name__)


def _early_updates(wanted: Wanted) -> str | None:
    pipeline, plan = wanted.pipeline, wanted.plan
    if pipeline is None or plan is None or not plan.updates_early or pipeline.microbatches == 1:
        return None
    return (
        "update_in_backward=True updates weights when their gradients have come, but in a pipeline they come"
        f" once for each of {pipeline.microbatches} micro-batches, which need the same weights; leave it out,"
        " or give it max_norm, so that updates can be taken back"
    )


def _nothing_to_train(wanted: Wanted) -> str | None:
    plan, optimizer = wanted.plan, wanted.optimizer
    if plan is None or optimizer is None or not issubclass(plan.kind, HalfWeightPlugin):
        return None
    if any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        return None
    return _cannot_divide(
        plan,
        "there is an optimizer without parameters to train; in a pipeline, cut the model so that every stage"
        " has some, or use TorchDDPPlugin or TorchFSDPPlugin, whose stages may be frozen",
    )


def _renormalizing(wanted: Wanted) -> str | None:
    plan, model = wanted.plan, user_module(wanted.model)
    if plan is None:
        return None
    if issubclass(plan.kind, GeminiPlugin):
        return renormalizing(model, "which would be lost")
    if issubclass(plan.kind, LowLevelZeroPlugin) and (problem := renormalizing_on(plan.replicas, model)):
        return _cannot_divide(plan, problem)
    return None


def _strangers(wanted: Wanted) -> str | None:
    if wanted.optimizer is None:
        return None
    raw = wanted.optimizer.unwrap() if isinstance(wanted.optimizer, OptimizerWrapper) else wanted.optimizer
    found = strangers(raw, user_module(wanted.model), wanted.criterion)
    problem = found.problem()
    if problem is not None or not found.held:
        return problem
    kind = None if wanted.plan is None else wanted.plan.kind
    shape = tuple(found.held[0].shape)
    if is_using_pp():
        return (
            f"{found.who} holds {len(found.held)} parameters that are not in this stage of the pipeline, such"
            f" as one of shape {shape}: it was built before the model was split, or a criterion has"
            " parameters of its own, which only the last stage would train; build it from the parameters of"
            " the stage, and put what a loss learns inside the model"
        )
    if kind is not None and issubclass(kind, GeminiPlugin | TorchFSDPPlugin):
        return (
            f"{found.who} holds a parameter of shape {shape} that is not in the model, so {kind.__name__}"
            " would not average its gradient; put the module that has it, such as a criterion, inside the"
            " model, or give it an optimizer of its own and average it yourself"
        )
    return None


def _whole_parameters(wanted: Wanted) -> str | None:
    plan, optimizer = wanted.plan, wanted.optimizer
    if plan is None or optimizer is None or not issubclass(plan.kind, GeminiPlugin):
        return None
    if any(isinstance(p, ColoTensor) for p in wanted.model.parameters()):
        return None  # they lie on ranks of their own, which Gemini asks
    raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
    return whole_parameters_problem(raw, plan.replicas)


def _cut_by_specs(wanted: Wanted) -> str | None:
    plan = wanted.plan
    if plan is None or not issubclass(plan.kind, TorchFSDPPlugin):
        return None
    named = user_module(wanted.model).named_parameters()
    cut = next((name for name, p in named if cut_dim(p) is not None), None)
    if cut is None:
        return None
    return (
        f"TorchFSDPPlugin cannot divide {cut}, a ColoParameter that is cut already: FSDP2 computes with plain"
        " tensors; cut the model by colossalai.nn.parallelize, or use TorchDDPPlugin"
    )


# The plugins that average each parameter over the ranks with the same piece of it.
ASK_EACH_PARAMETER = TorchDDPPlugin | LowLevelZeroPlugin | GeminiPlugin


def _cut_over_rows(wanted: Wanted) -> str | None:
    """An expert is on some of the ranks that average other parameters."""
    plan = wanted.plan
    if plan is None or not issubclass(plan.kind, DPPluginBase):
        return None
    if (cut := cut_over_rows(user_module(wanted.model))) is None:
        return None
    if not issubclass(plan.kind, ASK_EACH_PARAMETER):
        return (
            f"{plan.kind.__name__} divides or averages all parameters over the same ranks, but {cut} is cut"
            " over some of them, whose pieces would be mixed; use TorchDDPPlugin, LowLevelZeroPlugin or"
            " GeminiPlugin, which ask each parameter"
        )
    rows = gpc.get_ranks_in_group(row_mode())
    if plan.ranks is None or plan.ranks == set(rows):
        return None
    return (
        f"{plan.kind.__name__} would average over the ranks {sorted(plan.ranks)}, but {cut} is cut over the"
        f" ranks of the launched plan that have different tokens, {rows}; leave out process_group"
    )


def _unaveraged(wanted: Wanted) -> str | None:
    """Every rank of one sequence has the gradients of its own tokens, and one with experts those of tokens of
    all.
    """
    if wanted.plan is not None or wanted.optimizer is None:
        return None
    cut = cut_over_rows(user_module(wanted.model))
    if not is_using_sequence() and cut is None:
        return None
    handlers = gpc.config.get("gradient_handler") or gpc.config.get("gradient_handlers")
    if wanted.averaged_over or handlers or is_using_pp():
        return None
    what = (
        "cuts sequences, so each rank has the gradients of its own tokens"
        if is_using_sequence()
        else f"cuts {cut} over ranks with different tokens, so each rank has the gradients of other tokens"
    )
    return (
        f"the launched plan {what}, and without a plugin nothing would average them; pass"
        " plugin=TorchDDPPlugin() or another to Booster, or name a gradient_handler in the config of"
        " colossalai.initialize"
    )


def warn_of_replicas(wanted: Wanted) -> None:
    """Warn where ranks of data train by themselves: who wants that can ignore it, others lose a training."""
    mesh = launched_mesh()
    ranks = 1 if mesh is None else mesh.size[DATA_AXIS]  # other ranks with other tokens are refused above
    by_itself = wanted.plan is None and wanted.optimizer is not None and not wanted.averaged_over
    by_itself = by_itself and model_mesh(user_module(wanted.model)) is None
    if ranks > 1 and by_itself and not is_using_pp():
        warnings.warn(
            f"the launched job has {ranks} data-parallel ranks, but Booster has no plugin: each rank trains"
            " by itself, and nothing averages their gradients; pass plugin='ddp' to Booster, or 'zero2',"
            " 'gemini' ..., unless this is what you want",
            stacklevel=3,
        )


def _pieces_as_replicas(wanted: Wanted) -> str | None:
    plan = wanted.plan
    if plan is not None and issubclass(plan.kind, GeminiPlugin):
        return None  # it takes the replicas from the process group of the parameters
    ranks = wanted.averaged_over if plan is None else plan.ranks or frozenset()
    for name, p in user_module(wanted.model).named_parameters():
        if cut_dim(p) is None or is_ddp_ignored(p):
            continue
        pg = p.process_group  # type: ignore[attr-defined]
        if ranks <= set(pg.dp_rank_list()):
            continue
        who = "initialize" if plan is None else plan.kind.__name__
        return (
            f"{who} would take the ranks {sorted(ranks)} for replicas and average {name} over them, but that"
            f" is a ColoParameter of which they hold different pieces: {pg} cuts it over the ranks"
            f" {pg.tp_rank_list()}. Launch with config=dict(parallel=dict(tensor=dict("
            f"size={pg.tp_world_size()}, mode='1d'))), so that the job knows of the pieces too; or wrap the"
            " model with ColoDDP(model, process_group) or ZeroDDP, which ask the process group"
        )
    return None


def _overlapping(wanted: Wanted) -> str | None:
    plan = wanted.plan
    moving = TorchFSDPPlugin | LowLevelZeroPlugin | GeminiPlugin
    if plan is None or not issubclass(plan.kind, moving):
        return None
    if (found := overlapping(user_module(wanted.model).named_parameters())) is None:
        return None
    return (
        f"the parameters {found[0]} and {found[1]} lie in the same memory, and {plan.kind.__name__} would"
        " give each its own, so that they train apart; use one parameter, and a part of it in the forward,"
        " or TorchDDPPlugin"
    )


def _wrapped_elsewhere(wanted: Wanted) -> str | None:
    if (late := adapted_too_late(wanted.model)) is not None:
        return late
    path = wrapped_elsewhere(wanted.model)
    if path is None or (
        wanted.plan is None and wanted.pipeline is None
    ):  # then told to all stages, before their first step
        return None
    return (
        f"{path} is on another stage, and a wrapper around the place that it had here would be computed on"
        " every stage; wrap the model's blocks before split_model, or layers inside of them"
    )


def _reach(wanted: Wanted) -> str | None:
    if wanted.optimizer is None:
        return None
    kind = None if wanted.plan is None else wanted.plan.kind
    return reach_problem(wanted.optimizer, kind, _holds_a_part(wanted.model))


def _on_own_mesh(wanted: Wanted) -> str | None:
    """A model whose own plan covers all ranks has one replica: there is nothing to divide."""
    plan, mesh = wanted.plan, model_mesh(user_module(wanted.model))
    if mesh is None:
        return None
    if is_using_pp() or wanted.pipeline is not None:
        return (
            f"the model was cut over {mesh} by a plan of its own, which knows no pipeline; launch without"
            " one, or cut the model by colossalai.nn.parallelize and split_model"
        )
    if plan is None or plan.kind is TorchDDPPlugin or not issubclass(plan.kind, DPPluginBase):
        return None
    return (
        f"{plan.kind.__name__} divides over ranks with the same weights, but the model was cut over"
        f" {mesh} by a plan of its own, which has chosen for every weight where it lies; leave the plugin"
        " out (gradients are complete after the backward pass), and give autoparallelize a memory_budget"
    )


def _foreign_ranks(wanted: Wanted) -> str | None:
    plan = wanted.plan
    if plan is None or plan.ranks is None or launched_mesh() is None:
        return None
    own = gpc.get_ranks_in_group(row_mode())
    if plan.ranks <= set(own):
        return None
    if is_using_pp():
        what, whose = "a stage of a pipeline", "this stage"
    elif (cut := _piece(wanted.model)) is not None:
        what, whose = f"{cut}, which tensor parallelism has cut,", "this piece"
    else:
        return None
    return (
        f"{plan.kind.__name__} would divide or average {what} over the ranks {sorted(plan.ranks)}, of which"
        f" only {own} hold {whose}; leave out process_group and HYBRID_SHARD"
    )


def _piece(model: nn.Module) -> str | None:
    """The name of a parameter that is a piece on the mesh of the launched job."""
    named = user_module(model).named_parameters()
    return next((name for name, p in named if placement(p).sharded and cut_dim(p) is None), None)


def _cannot_divide(plan: Plan, why: str) -> str:
    return f"{plan.kind.__name__} cannot divide the model: {why}"


CHECKS: tuple[Callable[[Wanted], str | None], ...] = (
    _on_own_mesh,
    _foreign_ranks,
    _chunks,
    _schedule,
    _early_updates,
    _strangers,
    _pieces_as_replicas,
    _cut_by_specs,
    _cut_over_rows,
    _unaveraged,
    _nothing_to_train,
    _renormalizing,
    _overlapping,
    _wrapped_elsewhere,
    _whole_parameters,
    _reach,
)
