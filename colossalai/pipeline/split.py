"""``split_model``: an existing model, such as those of Hugging Face, becomes this rank's stage of a pipeline.

How an architecture is cut in depth is a row of its policy (``colossalai.nn.policies.Depth``); how a stage
works is told in ``colossalai.nn.policies.stages.stage``.  Here is decided which blocks go where, and tied
weights are shared between stages.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh.rows import expert_axes
from colossalai.mesh.weights.deferred import Deferred
from colossalai.mesh.weights.meta_models import before_cut, defer_meta, is_on_meta, note_cut
from colossalai.nn.modes import current
from colossalai.nn.policies import POLICIES, Policy, parallelize
from colossalai.nn.policies.stages.depth import Depth, ModelParts, carried_depth, find_parts
from colossalai.nn.policies.stages.derive_depth import derive_depths
from colossalai.nn.policies.stages.per_block import refuse_configured
from colossalai.nn.policies.stages.stage import ModelStage, StageShare, copy_above, take_stage
from colossalai.nn.policies.trials.verify import Verification
from colossalai.nn.policies.wrap_forward import WholeOutputs
from colossalai.pipeline.options import PipelineOptions
from colossalai.pipeline.partition import partition_balanced, partition_uniform
from colossalai.pipeline.schedule import make_timetable
from colossalai.pipeline.stage import Placement
from colossalai.pipeline.tied import tie_stages

PARTITIONS = ("balanced", "uniform")


def split_model(
    model: nn.Module,
    placement: Placement | None = None,
    rank: int | None = None,
    *,
    partition: str | Sequence[int] = "balanced",
    policy: Policy | None = None,
    recording: Deferred | None = None,
) -> nn.Module:
    """This rank's stage of ``model``, or with several chunks a ``ModuleList`` of its stages; ``model`` is
    used up.

    First the model is cut as ``parallelize`` does it in the tensor mode of the job, unless it is parallel
    already.  A stage has the class, the forward and the parameter names of the model.  The first argument of
    all stages but the first is what the stage before returned; all get the batch as keywords.

    Args:
        placement: how the stages lie on the ranks; by default as the config of the launched job says.
        rank: this rank's place in the pipeline, by default that in the launched job.
        partition: ``"balanced"`` by parameters, ``"uniform"`` by blocks, or the number of blocks of each
            stage, in their order.
        policy: says what the blocks are (``Policy.depth``); by default that of the architecture.
        recording: in which the model was built without memory; the stage gets its memory and its values.

    Every rank of the job must call it with the same model.
    """
    placement, rank = _place(placement, rank)
    _check_whole(model)
    _check_layer_drop(model, placement)
    if placement.stages > 1:
        refuse_configured(model)
    depth = _find_depth(model, policy)
    if depth is None:
        plan = _derive_plan(model, placement, partition)
    else:
        plan = _Plan(model, find_parts(model, depth), placement, partition)
    before = before_cut(model)
    if not isinstance(model, WholeOutputs):
        model = _parallelize(model, policy)
    holders = plan.parameters(model)
    stages = plan.take(model, rank)
    result = _together(stages)
    note_cut(result, before, partial(_cut_again, plan=plan, rank=rank, policy=policy))
    if recording is not None:
        recording.materialize(result)
    own = {placement.stage(rank, chunk): stage for chunk, stage in enumerate(stages)}
    dealt = [
        [(s, s + 1) for s in (placement.stage(r, c) for c in range(placement.chunks))]
        for r in range(placement.ranks)
    ]
    tie_stages(own, holders, dealt, rank)
    return result


def _together(stages: list[nn.Module]) -> nn.Module:
    return stages[0] if len(stages) == 1 else nn.ModuleList(stages)


def _cut_again(model: nn.Module, plan: _Plan, rank: int, policy: Policy | None) -> nn.Module:
    """The stages of ``rank`` of another model of the same form."""
    if not isinstance(model, WholeOutputs):
        model = _parallelize(model, policy)
    return _together(plan.take(model, rank))


def _place(placement: Placement | None, rank: int | None) -> tuple[Placement, int]:
    launched = gpc.is_initialized(ParallelMode.PIPELINE)
    if placement is None:
        placement = _configured() if launched else Placement(1)
    if launched and placement.ranks != gpc.pipeline_parallel_size:
        raise ValueError(
            f"split_model got a placement on {placement.ranks} ranks, but the pipeline of the job has "
            f"{gpc.pipeline_parallel_size}"
        )
    if rank is None:
        rank = gpc.get_local_rank(ParallelMode.PIPELINE) if launched else 0
    if rank not in range(placement.ranks):
        raise ValueError(
            f"a pipeline of {placement.ranks} ranks has the ranks 0 to {placement.ranks - 1}, got {rank!r}"
        )
    return placement, rank


def _configured() -> Placement:
    options = PipelineOptions.from_config(gpc.config, gpc.plan)
    return make_timetable(
        options.schedule, gpc.pipeline_parallel_size, options.microbatches, options.chunks
    ).placement


def _find_depth(model: nn.Module, policy: Policy | None) -> Depth | None:
    """What a policy, or the config of the model, says of its depth."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    found = policy or next((p for p in POLICIES if kind in p.model_types), None)
    return carried_depth(model) if found is None or found.depth is None else found.depth


def _derive_plan(model: nn.Module, placement: Placement, partition: str | Sequence[int]) -> _Plan:
    """The first plan of those that the code of ``model`` suggests whose stages compute what it does.

    They are tried on every rank, with other weights and a tiny batch of random numbers.
    """
    plans = [
        _Plan(model, find_parts(model, depth, derived=True), placement, partition)
        for depth in derive_depths(model)
    ] or _refuse_unknown(model)
    if placement.stages == 1:
        return plans[0]
    who = f"split_model found the blocks of {type(model).__name__} at {plans[0].parts.towers[0].blocks!r}"
    advice = "pass policy=Policy(..., depth=Depth(blocks=..., entry=...))"
    norm = next((name for name, module in model.named_modules() if isinstance(module, _BatchNorm)), None)
    if norm is not None:
        raise ValueError(
            f"{who}, but its {norm!r} ({type(model.get_submodule(norm)).__name__}) takes statistics over the"
            " rows of a batch, which a pipeline cuts into micro-batches, so it would not train as the whole"
            f" model does; use another norm, or if this is what you want {advice}"
        )
    whole = _verification(model)
    if whole.inputs is None:
        raise ValueError(
            f"{who}, but could not try the stages, as the model is on the plain meta device (build it in"
            f" colossalai.lazy.LazyInitContext() instead) or takes arguments that are not known; {advice}"
        )
    problems = []
    for plan in plans:
        problems.append(plan.problem(whole, whole.inputs))
        if not problems[-1]:
            return plan
    raise ValueError(
        f"{who}, but stages that are cut there do not compute what the whole model does ({problems[0]});"
        f" {advice}, or train without a pipeline"
    )


def _verification(model: nn.Module) -> Verification:
    whole = Verification(model, weightless=True)
    if whole.inputs is None and any(map(is_on_meta, model.parameters())):
        # without memory, but with values that can be had: some come to all weights, those of buffers matter
        with torch.random.fork_rng(devices=[]), suppress(ValueError):
            whole = Verification(defer_meta(copy.deepcopy(model)), weightless=True)
    return whole


def _refuse_unknown(model: nn.Module) -> NoReturn:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = ", ".join(kind for policy in POLICIES if policy.depth for kind in policy.model_types)
    raise ValueError(
        f"split_model does not know how {type(model).__name__} (model_type {kind!r}) is cut in depth: neither"
        " a policy nor its config (base_model_pp_plan) says so, and no list of like blocks that its forward"
        f" walks through once was found. It knows {known}; for another model with one list of blocks pass"
        " policy=Policy(..., depth=Depth(blocks=..., entry=...))"
    )


def _check_whole(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ModelStage):
            verb = "is" if module is model else "holds"
            raise ValueError(
                f"this {type(model).__name__} {verb} stage {module.share.index} of {module.share.stages}"
                " already; split a model once"
            )


def _check_layer_drop(model: nn.Module, placement: Placement) -> None:
    rate = getattr(getattr(model, "config", None), "layerdrop", 0.0)
    if rate and placement.stages > 1:
        raise ValueError(
            f"{type(model).__name__}: layerdrop={rate} may drop the blocks where stages meet; set"
            " config.layerdrop=0.0"
        )


def _parallelize(model: nn.Module, policy: Policy | None) -> nn.Module:
    mesh = current().mesh
    shares_experts = mesh is not None and mesh.group_size(*expert_axes(mesh)) > 1
    if policy is not None and not policy.rules and not shares_experts:
        return model  # it speaks of the depth alone
    return parallelize(model, policy=policy)


@dataclass(init=False)
class _Plan:
    """The blocks of each stage, and the names under which it holds parameters."""

    parts: ModelParts
    placement: Placement
    ranges: list[range]
    names: dict[str, tuple[str, ...]]

    def __init__(
        self, model: nn.Module, parts: ModelParts, placement: Placement, partition: str | Sequence[int]
    ) -> None:
        self.parts, self.placement = parts, placement
        self.ranges = _ranges(model, parts, placement.stages, partition)
        self.names = _names(model)

    def parameters(self, model: nn.Module) -> list[dict[str, nn.Parameter]]:
        """The parameters of every stage by name; those that are tied are the same."""
        found: list[dict[str, nn.Parameter]] = [{} for _ in self.ranges]
        for name, param in model.named_parameters(remove_duplicate=False):
            everywhere = self.parts.is_shared(name)
            for stage in range(len(found)) if everywhere else [self._stage_of(self.parts.owner(name))]:
                found[stage][name] = param
        return found

    def _stage_of(self, owner: int) -> int:
        """The stage of a block, of the entry (-1) or of the tail (the number of blocks)."""
        if owner < 0:
            return 0
        last = len(self.ranges) - 1
        return last if owner == self.parts.count else next(i for i, r in enumerate(self.ranges) if owner in r)

    def take(self, model: nn.Module, rank: int) -> list[nn.Module]:
        """The stages of ``rank``; the first of them is ``model`` itself."""
        parts, chunks = self.parts, range(self.placement.chunks)
        models = [model, *(copy_above(model, parts.paths) for _ in chunks[1:])]
        stages = []
        for chunk, twin in zip(chunks, models, strict=True):
            index = self.placement.stage(rank, chunk)
            stages.append(take_stage(twin, parts, self._share(index)))
        return stages

    def problem(self, whole: Verification, inputs: dict[str, Any]) -> str:
        """What is wrong with the stages, run one after the other, in words; nothing if they compute what the
        ``whole`` model does.
        """

        def run() -> Any:
            output: Any = ()
            for i in range(len(self.ranges)):
                twin = copy_above(whole.model, self.parts.paths)
                stage = take_stage(twin, self.parts, self._share(i), refuses=False)
                output = stage(*(output if isinstance(output, tuple) else (output,)), **inputs)
            return output

        try:
            problem = whole.difference(whole.answers(whole.model, run))
            if not problem and (name := whole.coupled()) is not None:
                return (
                    f"its output {name!r} relates the rows of a batch to each other, and a pipeline cuts the"
                    " batch into micro-batches"
                )
            return problem
        except Exception as error:  # whatever the code of the model raises
            return f"{type(error).__name__}: {error}"

    def _share(self, index: int) -> StageShare:
        here, count = self.ranges[index], self.parts.count
        receives = self.parts.sent(here.start) if index else ()
        sends = self.parts.sent(here.stop) if here.stop < count else ()
        return StageShare(index, len(self.ranges), here, self.names, receives, sends)


def _names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a tensor of ``model``, with those in its state of the same tensor: none for a buffer that
    is not saved.
    """
    same = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        same[id(tensor)].append(name)
    tensors = (*model.named_buffers(), *model.state_dict(keep_vars=True).items())
    return {name: tuple(same.get(id(tensor), ())) for name, tensor in tensors}


def _ranges(model: nn.Module, parts: ModelParts, stages: int, partition: str | Sequence[int]) -> list[range]:
    who, count = type(model).__name__, parts.count
    if isinstance(partition, Sequence) and not isinstance(partition, str):
        return _counted(who, count, stages, list(partition))
    if partition not in PARTITIONS:
        raise ValueError(
            f"split_model(partition={partition!r}): it is 'balanced', 'uniform', or the numbers of blocks of"
            " the stages"
        )
    if count < stages:
        raise ValueError(
            f"{who} has {count} blocks, fewer than the {stages} stages of the pipeline; use fewer stages or"
            " chunks"
        )
    if partition == "uniform":
        dealt = partition_uniform(count, stages)
    else:
        weights = [0.0] * count
        for name, param in model.named_parameters(remove_duplicate=False):
            if not parts.is_shared(name):
                weights[min(max(parts.owner(name), 0), count - 1)] += param.numel()
        dealt = partition_balanced(weights, stages)
    return [range(*only) for (only,) in dealt]


def _counted(who: str, count: int, stages: int, counts: list[Any]) -> list[range]:
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts):
        raise ValueError(
            f"split_model: the numbers of blocks must be whole numbers of at least 1, got partition={counts}"
        )
    if len(counts) != stages or sum(counts) != count:
        raise ValueError(
            f"split_model: {who} has {count} blocks for {stages} stages, but partition={counts} gives"
            f" {sum(counts)} to {len(counts)}"
        )
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - n, end) for end, n in zip(ends, counts, strict=True)]
