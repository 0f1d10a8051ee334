"""``parallelize``: an existing model becomes tensor-parallel, or its sequences are cut, in place.

First everything is tried on empty twins of the modules, so that a size that does not divide, or a mode that
an architecture does not allow, is refused while the model is still whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from colossalai.context.tensor_modes import tensor_mode
from colossalai.logging import get_dist_logger
from colossalai.mesh import Mesh, placement
from colossalai.mesh.agreement import FirstStep
from colossalai.mesh.parameter import overlapping
from colossalai.mesh.rows import expert_axes, sequence_axes
from colossalai.mesh.weights.deferred import resumed
from colossalai.mesh.weights.meta_models import before_cut, note_cut
from colossalai.nn.layer.base import FOLLOW_CONFIG
from colossalai.nn.logits import Logits
from colossalai.nn.modes import TensorParallel, current, mode_serial, tensor_parallel
from colossalai.nn.policies.cutting.adapters import (
    AdaptedOutputs,
    AdapterView,
    base_of,
    check_adapters,
    without_adapters,
)
from colossalai.nn.policies.cutting.balance_loss import balance_over_ranks, balances_experts
from colossalai.nn.policies.cutting.causal_loss import check_causal, compute_loss_from_pieces
from colossalai.nn.policies.cutting.cut_cache import CutCache
from colossalai.nn.policies.cutting.experts import GeneratesTogether, find_experts
from colossalai.nn.policies.cutting.hugging_face import POLICIES
from colossalai.nn.policies.cutting.model_own_plan import carried_policy
from colossalai.nn.policies.cutting.own_hooks import FORWARD_HOOKS, check_own_hooks, keeps_hooks
from colossalai.nn.policies.cutting.policy import Match, Policy
from colossalai.nn.policies.cutting.rules import (
    Cut,
    CutContext,
    Head,
    Heads,
    InnerDropout,
    StreamDropout,
    Summed,
    Table,
    check_heads,
)
from colossalai.nn.policies.sequences.plan import SEQUENCE_ADVICE, LossFromPieces, SequencePlan, plan_sequence
from colossalai.nn.policies.trials.derive import DerivedPolicy, derive_policy
from colossalai.nn.policies.trials.trace import MetaInputs, PlanTrace, trace
from colossalai.nn.policies.trials.verify import ADVICE, Verification
from colossalai.nn.policies.wrap_forward import WholeOutputs, first_step, wrap_forward
from colossalai.nn.sequence import SequenceParallel, current_sequence
from colossalai.utils.boosted import is_boosted

M = TypeVar("M", bound=nn.Module)
MODES = (None, "1d", "2d", "2.5d", "3d")


def parallelize(
    model: M,
    mode: str | None = FOLLOW_CONFIG,
    *,
    policy: Policy | None = None,
    whole_scores: bool = True,
    mesh: Mesh | None = None,
    verify: bool | None = None,
) -> M:
    """Cut ``model``, and its sequences where the launched job cuts these, over the ranks that share it, in
    place, and return it.

    ``mode`` is None (nothing is cut), '1d', '2d', '2.5d' or '3d', by default that of the launched job.
    ``policy`` says which module is cut how, by default that of the model's architecture, or the plan that its
    config carries, or in 1D a plan that is derived from its code.  ``mesh`` is that of the launched job
    unless given.  A model on the meta device stays there, to be filled by ``boost``, as the whole model would
    have been, or by :func:`colossalai.checkpoint_io.load_pretrained`.

    With ``verify`` the outputs of the whole model and of the cut one are compared once, on a tiny batch of
    random numbers; by default for a plan that was derived, and where sequences are cut.

    With ``whole_scores=False`` a causal language model that is given labels computes its loss from pieces of
    the scores, and returns these pieces; whole scores are its largest tensor.  Where sequences are cut, these
    are the scores of this rank's tokens.

    Every rank must hold the same model.  All ranks give it the same whole batch, and its outputs are whole on
    all of them.
    """
    options: dict[str, Any] = {"policy": policy, "whole_scores": whole_scores, "mesh": mesh}
    again = partial(parallelize, mode=mode, verify=False, **options)
    tp, mesh = _mode_and_mesh(mode, mesh)
    base = base_of(model)  # below the model of adapters that PEFT makes of it
    _refuse_adapted(model, base)
    if mesh is None:
        return model
    sequence, balanced = _sequence(model, tp, mesh), balances_experts(base, mesh)
    context = CutContext(tp, mesh, whole_scores, _shared(model))
    plan = _plan(model, base, policy, context) if tp.size > 1 else _experts_alone(base, context)
    if tp.size == 1 and sequence is None:
        whole_scores = True  # nothing cuts them
        if not plan.matches:
            return balance_over_ranks(model, base, mesh) if balanced else model
    if tp.size == 1 and not whole_scores:
        check_causal(base, {id(base.get_output_embeddings())})
    verifications = _verifications(base, plan, verify, sequence)
    before = before_cut(model)
    with resumed(model):  # where the model has no memory yet, neither has its piece
        _replace(base, plan.matches, context)
        _retie(base, context)
    if tp.inner.dims[0]:
        wrap_forward(base, CutCache)
    if plan.shared_experts:
        wrap_forward(base, GeneratesTogether)
    if balanced:
        balance_over_ranks(model, base, mesh)
    cut = None if sequence is None else sequence.apply(base)
    if cut is not None and not whole_scores:
        wrap_forward(base, LossFromPieces).cut_tokens = cut
    cut_scores = None if whole_scores else compute_loss_from_pieces(base, mesh, cut)
    _wrap(base, WholeOutputs, context, plan.cut_attentions, cut_scores)
    if model is not base:
        base.first_step = FirstStep(mesh, (), compare_gradients=False)  # the outer one compares
        _wrap(model, AdaptedOutputs, context)
    for verification in verifications:
        verification.compare(base, ADVICE if sequence is None else SEQUENCE_ADVICE)
    note_cut(model, before, again)
    return model


def _refuse_adapted(model: nn.Module, base: nn.Module) -> None:
    name = type(model).__name__
    if isinstance(base, WholeOutputs):
        raise ValueError(f"this {name} is parallel already; parallelize a model once")
    if is_boosted(model):
        raise ValueError(
            f"this {name} was boosted already, with an optimizer of the parameters that it has now; call"
            " parallelize before the optimizer is built, and boost afterwards"
        )


def _wrap(
    model: Any,
    kind: type[WholeOutputs],
    context: CutContext,
    cut_attentions: bool = False,
    cut_scores: Logits | None = None,
) -> None:
    wrap_forward(model, kind)
    model.cut_as = context.tp, context.mesh
    model.cut_attentions, model.cut_scores = cut_attentions, cut_scores
    model.first_step = first_step(context.mesh)


@dataclass(frozen=True)
class _ModulePlan:
    """What is done to the modules of a model."""

    matches: list[Match]
    cut_attentions: bool = False
    derived: bool = False
    shared_experts: bool = False
    """Whether ranks hold different experts, and need each other in every pass."""


def _plan(model: nn.Module, base: nn.Module, policy: Policy | None, context: CutContext) -> _ModulePlan:
    """How the modules of ``base`` are cut over the tensor-parallel ranks; what does not fit is refused."""
    view = without_adapters(base)
    check_adapters(model, view, context)
    policy = policy or _find_policy(view.bare, context)
    experts = _experts(base, view, context)
    matches = view.matches(policy.matches(view.bare), context) + experts
    _check(base, policy, matches, context)
    inputs = policy.inputs if isinstance(policy, DerivedPolicy) else None
    cut_attentions = _complete(base, matches, context, inputs)
    return _ModulePlan(
        matches, cut_attentions, isinstance(policy, DerivedPolicy), _are_shared(experts, context)
    )


def _experts_alone(base: nn.Module, context: CutContext) -> _ModulePlan:
    """The plan of a model of which ranks hold different experts, and all else."""
    experts = _experts(base, without_adapters(base), context)
    if not _are_shared(experts, context):
        return _ModulePlan([])
    _check_shared(base, experts, _try(base, experts, context))
    return _ModulePlan(experts, shared_experts=True)


def _experts(base: nn.Module, view: AdapterView, context: CutContext) -> list[Match]:
    """The modules with experts, of which this rank will hold a part."""
    found = list(find_experts(view.bare))
    ranks = context.mesh.group_size(*expert_axes(context.mesh))
    if not found and ranks > 1:
        get_dist_logger().warning(
            f"parallelize({type(base).__name__}): it has no experts that {ranks} ranks (parallel.moe.size)"
            " could share, and each of them holds all of it",
            ranks=[0],
        )
    if ranks == 1 and context.tp.size == 1:
        return []
    return view.matches(found, context)


def _are_shared(experts: list[Match], context: CutContext) -> bool:
    return bool(experts) and context.mesh.group_size(*expert_axes(context.mesh)) > 1


def _verifications(
    base: nn.Module, plan: _ModulePlan, asked: bool | None, sequence: SequencePlan | None
) -> list[Verification]:
    """What ``base`` computes as a whole, if it will be compared: by default where the plan was found from its
    code.
    """
    if not (plan.derived or sequence is not None if asked is None else asked):
        return []
    found = [Verification(base)] if sequence is None else sequence.verifications(base)
    if not all(verification.possible for verification in found):
        _say_unverified(base, asked)
    return found


def _sequence(model: nn.Module, tp: TensorParallel, mesh: Mesh) -> SequencePlan | None:
    """How the sequences of ``model`` are cut: as the job was launched, or by the axes of a mesh of its
    own.
    """
    cut = current_sequence()
    if cut is None or cut.mesh is not mesh:
        axes = [axis for axis in sequence_axes(mesh) if mesh.size[axis] > 1]
        cut = SequenceParallel(mesh, *axes) if axes else None
    return None if cut is None else plan_sequence(base_of(model), cut, mesh.group_size(*tp.inner.dims[-1]))


def _say_unverified(model: nn.Module, verify: bool | None) -> None:
    """Refuse ``verify=True`` for a model that cannot be run whole, and warn where it was not asked for."""
    words = (
        f"parallelize({type(model).__name__}) cannot compare the cut model with the whole one: its weights"
        " have no values yet (meta device, LazyInitContext), or no arguments are known that its forward takes"
    )
    if verify:
        raise ValueError(f"{words}; leave verify=True out, or build the model with its weights")
    get_dist_logger().warning(
        f"{words}; its plan was found from its code, so compare its loss with the serial one", ranks=[0]
    )


def _mode_and_mesh(mode: str | None, mesh: Mesh | None) -> tuple[TensorParallel, Mesh | None]:
    tp, launched = current()
    if mode == FOLLOW_CONFIG and (tp.mode in (None, "sequence") or tp.size == 1):
        return mode_serial(), mesh or launched
    if mode == FOLLOW_CONFIG:
        mode = tp.mode
    if mode is None:
        return mode_serial(), None
    if mode not in MODES:
        raise ValueError(f"parallelize: unknown mode {mode!r}; the modes are {', '.join(map(repr, MODES))}")
    if mesh is not None:
        tp = _on_mesh(mode, mesh)
    elif tp.mode != mode:
        raise ValueError(
            f"parallelize(mode={mode!r}): the job's tensor mode is {tp.mode!r}; launch with "
            f"parallel=dict(tensor=dict(size=..., mode={mode!r})), or pass mesh="
        )
    if tp.hidden.dims[1]:
        raise ValueError(
            "parallelize: attention of existing models asks the residual stream for the length of the"
            " sequence, which sequence_parallel cuts; launch without sequence_parallel"
        )
    return tp, mesh or launched


def _on_mesh(mode: str, mesh: Mesh) -> TensorParallel:
    """The mode on a mesh that has its axes."""
    row = tensor_mode(mode)
    missing = [axis for axis in row.axes if axis not in mesh.size]
    if missing:
        raise ValueError(
            f"parallelize(mode={mode!r}) needs a mesh with axis {missing[0]!r}; it has {', '.join(mesh.size)}"
        )
    return tensor_parallel(mode, mesh.group_size(*row.axes), mesh.size.get("dep", 1))


def _find_policy(model: nn.Module, context: CutContext) -> Policy:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    table = next((policy for policy in POLICIES if kind in policy.model_types), None)
    found, problem = (table, None) if table is not None else _carried(model, context)
    if found is not None and not _lacks_keys(model, found, context):
        return found
    derived = None if context.stream_is_cut else derive_policy(model, context)
    _check_alike(model, derived)
    if derived is not None:
        if words := derived.report():
            get_dist_logger().warning(f"parallelize({type(model).__name__}):\n{words}", ranks=[0])
        return derived
    if found is not None:
        return found
    if problem is not None:
        raise problem
    known = ", ".join(kind for policy in POLICIES for kind in policy.model_types)
    why = "only mode '1d' can be derived" if context.stream_is_cut else "none could be derived from its code"
    raise ValueError(
        f"parallelize has no policy for {type(model).__name__} (model_type {kind!r}), its config carries no"
        f" base_model_tp_plan, and {why}; pass policy=colossalai.nn.policies.Policy(...). There are policies"
        f" for {known}"
    )


def _carried(model: nn.Module, context: CutContext) -> tuple[Policy | None, ValueError | None]:
    """The plan of the model's config, if it has one that fits; else what is wrong with it."""
    try:
        found = carried_policy(model)
        if found is not None and not context.stream_is_cut:
            traced = trace(model, list(found.matches(model)), context)
            if traced is None and next(find_experts(model), None) is not None:
                raise ValueError(  # such plans leave out what they do not know, as in Kimi Linear
                    f"the plan that the config of {type(model).__name__} carries cannot be tried on the meta"
                    " device; pass policy=colossalai.nn.policies.Policy(...) to parallelize"
                )
    except ValueError as error:
        return None, error
    return found, None


def _check_alike(model: nn.Module, derived: DerivedPolicy | None) -> None:
    """Refuse plans that differ between ranks, which would wait for each other later."""
    own = "" if derived is None else repr([(path, rule) for path, _, rule in derived.matches(model)])
    if dist.is_initialized() and dist.get_backend() != "fake":
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        other = next((rank for rank, rules in enumerate(everyone) if rules != everyone[0]), None)
        if other is not None:
            raise ValueError(
                f"parallelize derived other plans for {type(model).__name__} on ranks 0 and {other}; every"
                " rank must hold the same model, in the same mode (train or eval) and of the same dtype"
            )


def _lacks_keys(model: nn.Module, policy: Policy, context: CutContext) -> bool:
    """Whether there are more ranks than heads of keys and values, which a derived plan repeats."""
    keys = _of_config(model, "num_key_value_heads") if "num_key_value_heads" in policy.heads else None
    parts = context.mesh.group_size(*context.tp.inner.dims[-1])
    return not context.stream_is_cut and isinstance(keys, int) and 0 < keys < parts and parts % keys == 0


def _shared(model: nn.Module) -> frozenset[int]:
    """The ids of the parameters that more than one module holds."""
    seen = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    return frozenset(i for i, times in seen.items() if times > 1)


def _check(model: nn.Module, policy: Policy, matches: list[Match], context: CutContext) -> None:
    who, mode = type(model).__name__, context.tp.mode
    if (found := overlapping(model.named_parameters())) is not None:
        raise ValueError(
            f"{who}: the parameters {found[0]} and {found[1]} lie in the same memory, and pieces of them"
            " would train apart; use one parameter, and a part of it in the forward"
        )
    if context.stream_is_cut and policy.only_1d:
        raise ValueError(
            f"{who} is cut by the plan that its config carries, which knows mode '1d' only; pass policy= for"
            f" mode {mode!r}"
        )
    if not any(isinstance(rule, Cut) for _, _, rule in matches):
        raise ValueError(
            f"no linear layer of {who} is named by the policy for {', '.join(policy.model_types)}; its"
            " modules may have other names in this version of transformers: pass"
            " policy=colossalai.nn.policies.Policy(...)"
        )
    if not context.whole_scores:
        check_causal(model, {id(module) for _, module, rule in matches if isinstance(rule, Head)})
    for name in policy.heads:
        number = _of_config(model, name)
        if number is not None:
            check_heads(f"{who}: {name}", number, context)
    if context.stream_is_cut:
        if context.mesh.group_size(*context.tp.hidden.dims[-1]) == 1:
            raise ValueError(
                f"mode {mode!r} with squares of side 1 cuts nothing but the batch, which data parallelism"
                " does; use a larger size, or a smaller depth"
            )
        _check_covered(model, matches, mode)
        _check_layer_drop(model, mode)
    _check_shared(model, matches, _try(model, matches, context))


def _of_config(model: nn.Module, name: str) -> Any:
    """A number of the model's config; None if it has none, or, as some of transformers, one for each
    layer.
    """
    try:
        return getattr(getattr(model, "config", None), name, None)
    except Exception:  # such a config raises an error of its own; modules are checked one by one as well
        return None


def _complete(model: nn.Module, matches: list[Match], context: CutContext, inputs: MetaInputs | None) -> bool:
    """Add the rules that follow from where cut activations go; returns whether the attentions are cut.

    In 1D only: in the other modes every module has a rule of its own.
    """
    by_rules = any(isinstance(rule, Heads) for _, _, rule in matches)
    if context.stream_is_cut or (found := trace(model, matches, context, inputs)) is None:
        return by_rules
    extra: list[Match] = [
        (path, model.get_submodule(path), Summed(names)) for path, names in found.summed.items()
    ]
    extra += [(path, model.get_submodule(path), InnerDropout()) for path in found.own]
    extra += [(path, model.get_submodule(path), StreamDropout()) for path in found.alike]
    if extra:
        matches += extra
        again = trace(model, matches, context, inputs)
        assert again is not None, "what could be traced once can be traced again"
        _check_dropout(type(model).__name__, again)
    return by_rules if found.cut_attentions is None else found.cut_attentions


def _check_dropout(who: str, found: PlanTrace) -> None:
    for path, what in (
        *(
            (p, "features of which each rank has a piece, but all ranks would drop the same")
            for p in found.own
        ),
        *((p, "activations that all ranks hold, but each rank would drop others") for p in found.alike),
    ):
        raise ValueError(
            f"{who}, module {path or 'the model itself'!r}: its dropout is for {what}; set its rate to 0, or"
            " pass a policy=colossalai.nn.policies.Policy(...) with InnerDropout() or StreamDropout() for it"
        )


def _try(model: nn.Module, matches: list[Match], context: CutContext) -> set[int]:
    """Apply the rules to empty twins; returns the ids of the parameters that will be cut."""
    trial = CutContext(context.tp, context.mesh, context.whole_scores)
    cut: set[int] = set()
    layouts: dict[int, tuple[str, Any]] = {}  # of shared parameters, with the first name
    for name, module, rule in matches:
        check_own_hooks(f"{type(model).__name__}, module {name!r}", module, keeps_hooks(rule, context))
        try:
            piece = rule.cut(_twin(module), trial)
        except ValueError as error:
            raise ValueError(
                f"{type(model).__name__}, module {name or 'the model itself'!r}: {error}"
            ) from error
        after = piece._parameters
        cut |= {id(p) for n, p in module._parameters.items() if p is not None and _is_cut(after.get(n))}
        for n, p in module._parameters.items():
            if id(p) not in context.shared or isinstance(rule, Head) or after.get(n) is None:
                continue  # a head lies as the table that it is tied to
            own = f"{name}.{n}", placement(after[n])  # type: ignore[arg-type]
            first = layouts.setdefault(id(p), own)
            if first[1] != own[1]:
                raise ValueError(
                    f"{type(model).__name__}: {first[0]} and {own[0]} are one parameter, which the policy"
                    f" would cut in two ways ({first[1]} and {own[1]}); untie them, or give both the same"
                    " rule"
                )
    return cut


def _is_cut(param: nn.Parameter | None) -> bool:
    return param is not None and bool(placement(param).sharded)


def _check_shared(model: nn.Module, matches: list[Match], cut: set[int]) -> None:
    """A module without a rule must not share a parameter of which only a piece will be left."""
    named = {id(module) for _, module, _ in matches}
    for name, module in model.named_modules():
        for param, tensor in module._parameters.items():
            if id(module) not in named and tensor is not None and id(tensor) in cut:
                raise ValueError(
                    f"{type(model).__name__}: {name}.{param} is shared with a module that the policy cuts,"
                    " but has no rule; name both in the policy, or neither"
                )


def _check_covered(model: nn.Module, matches: Iterable[Match], mode: str | None) -> None:
    """Outside of 1D a module without a rule would work on a piece as if it were the whole."""
    named = {id(module) for _, module, _ in matches}
    covered = {id(p) for _, module, _ in matches for p in module._parameters.values()}
    left = [
        name
        for name, module in model.named_modules()
        if id(module) not in named
        and any(p is not None and id(p) not in covered for p in module._parameters.values())
    ]
    if left:
        raise ValueError(
            f"mode {mode!r} cuts every activation of {type(model).__name__}, but the policy has no rule for "
            f"{', '.join(left)}; use mode '1d', where they stay whole, or pass a policy that names them"
        )


def _check_layer_drop(model: nn.Module, mode: str | None) -> None:
    rate = getattr(getattr(model, "config", None), "layerdrop", 0.0)
    if rate:
        raise ValueError(
            f"{type(model).__name__}: layerdrop={rate} drops whole layers by numbers that differ between"
            f" ranks in mode {mode!r}; set config.layerdrop=0.0, or use mode '1d'"
        )


def _twin(module: nn.Module) -> nn.Module:
    """The same module with parameters that have a shape only; submodules are not copied."""
    twin = copy.copy(module)
    twin._parameters = {
        n: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for n, p in module._parameters.items()
    }
    return twin


def _replace(model: nn.Module, matches: list[Match], context: CutContext) -> None:
    """Apply the rules; ``matches`` is used up, so that what was replaced is freed as it goes."""
    parents = _parents(model)
    matches.sort(
        key=lambda match: isinstance(match[2], Table)
    )  # the last is first: a tied head takes the table's piece
    while matches:
        _, module, rule = matches.pop()
        native = dict(module._parameters)
        new = rule.cut(module, context)
        context.tie(new, native)
        if keeps_hooks(rule, context):
            new.__dict__.update({name: module.__dict__[name] for name in FORWARD_HOOKS})
        for parent, name in parents[id(module)] if new is not module else []:
            setattr(parent, name, new)


def _parents(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every place of every module; one that is used twice has two."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            places.setdefault(id(child), []).append((parent, name))
    return places


def _retie(model: nn.Module, context: CutContext) -> None:
    """Give other holders of a shared parameter its piece, such as BERT's bias of scores, which two modules
    hold.
    """
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and (piece := context.piece_of(param)) is not None:
                module._parameters[name] = piece
