"""Derives the 1D plan of a model for which there is no table.

Branches are found by one forward pass on the meta device (:mod:`branches`), ways to cut each are tried on
random numbers (:mod:`branch_trial`), and the whole plan is traced on the meta device (:mod:`trace`) before
the model is touched.  A branch whose heads or features cannot be divided among the ranks keeps its code
whole: only the weights of its layers are cut, and activations are gathered behind each.  What cannot be cut
so either is replicated.  The report names both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from colossalai.nn.policies.cutting.experts import find_experts
from colossalai.nn.policies.cutting.policy import Match, Policy
from colossalai.nn.policies.cutting.rules import (
    Attributes,
    Cut,
    CutContext,
    Head,
    Pieces,
    Repeated,
    Rule,
    SlicedArguments,
    Table,
    embedding_scale,
    sizes_of,
)
from colossalai.nn.policies.trials.branch_trial import Way, try_branch
from colossalai.nn.policies.trials.branches import BranchedModel, LinearBranch, find_branches
from colossalai.nn.policies.trials.trace import MetaInputs, trace

CUT, GATHERED, WHOLE = "cut", "gathered", "whole"


@dataclass(frozen=True)
class PlannedBranch:
    """A branch with what is done with it."""

    branch: LinearBranch
    kind: str
    """The same for the like branches of all blocks."""
    state: str
    way: Way | None = None
    why: str = ""

    def rules(self) -> Iterator[tuple[str, Rule]]:
        if self.state == GATHERED:
            yield from ((path, Cut("expand", whole_output=True)) for path in self.branch.openers)
            yield from ((path, Cut("contract", whole_input=True)) for path in self.branch.closers)
        if self.state == CUT and self.way is not None:
            yield from _rules(self.branch, self.way)


def _rules(branch: LinearBranch, way: Way) -> Iterator[tuple[str, Rule]]:
    yield from ((path, Cut("expand", fused)) for path, fused in way.fused.items())
    yield from ((path, Repeated(way.groups)) for path in way.repeated)
    yield from ((path, Cut("expand", divided=first)) for path, first in way.divided.items())
    yield from ((path, Cut("contract")) for path in branch.closers)
    yield from ((path, Pieces("inner", dict(dims))) for path, dims in way.parameters.items())
    yield from ((path, Attributes(values)) for path, values in way.attributes.items())
    if way.arguments:
        yield branch.home, SlicedArguments(dict(way.arguments))


@dataclass(frozen=True)
class DerivedPolicy(Policy):
    """Rules for the modules of one model, by their whole paths; a module may have several."""

    planned: tuple[PlannedBranch, ...] = ()
    outside: tuple[tuple[str, Rule], ...] = ()
    """Rules for what is no part of a branch: the table and the head."""
    notes: tuple[str, ...] = ()
    inputs: MetaInputs | None = None
    """Arguments with which the model runs on the meta device."""

    def matches(self, model: nn.Module) -> Iterator[Match]:
        for branch in self.planned:
            for path, rule in branch.rules():
                yield path, model.get_submodule(path), rule
        for path, rule in self.outside:
            yield path, model.get_submodule(path), rule

    def report(self) -> str:
        """What is not divided among the ranks, in words; empty if all of it is."""
        lines = list(self.notes)
        for state, words in (
            (GATHERED, "its weights are cut, but every rank computes all of it"),
            (WHOLE, "it is whole on every rank"),
        ):
            kinds = Counter((p.kind, p.why) for p in self.planned if p.state == state)
            lines += [f"{kind} ({n} times): {words}; {why}" for (kind, why), n in kinds.items()]
        return "\n".join(lines)


def derive_policy(model: nn.Module, context: CutContext) -> DerivedPolicy | None:
    """A plan for ``model`` in 1D; None if nothing of it can be cut, or if it cannot be run to look at it."""
    found = find_branches(model)
    if found is None or not found.branches:
        return None
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    planned = tuple(_plan(model, found, context))
    outside, notes = _outside(model)
    policy = DerivedPolicy(
        (kind,),
        {},
        (),
        only_1d=True,
        planned=planned,
        outside=outside,
        notes=(*_left(model, planned), *notes),
        inputs=found.inputs,
    )
    policy = _checked(model, policy, context)
    return policy if any(isinstance(rule, Cut) for _, _, rule in policy.matches(model)) else None


# ---- branches ----


def _plan(model: nn.Module, found: BranchedModel, context: CutContext) -> Iterator[PlannedBranch]:
    parts = context.mesh.group_size(*context.tp.inner.dims[-1])
    known: dict[str, list[_RelativeWay]] = {}
    for branch in found.branches:
        kind = _kind(branch)
        if any(
            id(p) in context.shared
            for path in (*branch.openers, *branch.closers)
            for p in model.get_submodule(path).parameters()
        ):
            yield PlannedBranch(branch, kind, WHOLE, why="its layers share weights with others")
            continue
        trial = try_branch(model, branch, found.calls[branch.home], parts)
        if trial is None:
            yield PlannedBranch(branch, kind, WHOLE, why="its code cannot be run by itself")
            continue
        ways = known.setdefault(kind, [])
        way = trial.find([w.at(branch) for w in ways])
        if way is None:
            yield _gathered(model, branch, kind, parts, f"no way to divide it among {parts} ranks was found")
        elif found.inputs is None:
            # nothing would tell which of its dropout all ranks must draw alike
            yield _gathered(model, branch, kind, parts, "the model does not run on the meta device")
        else:
            ways.append(_RelativeWay(branch, way))
            yield PlannedBranch(branch, kind, CUT, way)


@dataclass(frozen=True)
class _RelativeWay:
    """A way that fitted one branch, to be tried with another one of its kind."""

    branch: LinearBranch
    way: Way

    def at(self, other: LinearBranch) -> Way:
        def moved(path: str) -> str:
            return other.home + path[len(self.branch.home) :]

        way = self.way
        return replace(
            way,
            fused={moved(path): n for path, n in way.fused.items()},
            repeated=tuple(map(moved, way.repeated)),
            divided={moved(path): n for path, n in way.divided.items()},
            attributes={moved(path): values for path, values in way.attributes.items()},
            parameters={moved(path): dims for path, dims in way.parameters.items()},
        )


def _kind(branch: LinearBranch) -> str:
    """The home of a branch with its layers, where numbers of blocks are left out."""
    start = len(branch.home) + 1
    openers, closers = (",".join(p[start:] for p in paths) for paths in (branch.openers, branch.closers))
    return f"{_in_blocks(branch.home)}: {openers} -> {closers}"


def _gathered(model: nn.Module, branch: LinearBranch, kind: str, parts: int, why: str) -> PlannedBranch:
    divides = all(sizes_of(model.get_submodule(p))[1] % parts == 0 for p in branch.openers) and all(
        sizes_of(model.get_submodule(p))[0] % parts == 0 for p in branch.closers
    )
    if divides:
        return PlannedBranch(branch, kind, GATHERED, why=why)
    return PlannedBranch(branch, kind, WHOLE, why=f"{why}, and the sizes of its layers are no multiples")


def _left(model: nn.Module, planned: tuple[PlannedBranch, ...]) -> list[str]:
    """Weights of blocks that belong to no branch."""
    known = {path for p in planned for path in (*p.branch.openers, *p.branch.closers)}
    known |= {path for p in planned if p.way is not None for path in p.way.parameters}
    known |= {path for path, _, _ in find_experts(model)}  # which have a rule of their own
    left: Counter[str] = Counter()
    for name, param in model.named_parameters():
        path, _, last = name.rpartition(".")
        if param.ndim > 1 and path not in known and any(part.isdecimal() for part in path.split(".")):
            left[_in_blocks(path if last == "weight" else name)] += 1
    return [f"{name} ({n} times): it is whole on every rank; it is in no branch" for name, n in left.items()]


def _in_blocks(path: str) -> str:
    """``path`` without the numbers of blocks."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


# ---- the table and the head ----


def _outside(model: nn.Module) -> tuple[tuple[tuple[str, Rule], ...], tuple[str, ...]]:
    table, head = (_embeddings(model, side) for side in ("input", "output"))
    weights = {id(m._parameters["weight"]) for m in (table, head) if m is not None}
    rules: list[tuple[str, Rule]] = []
    for name, module in model.named_modules():
        if id(module._parameters.get("weight")) not in weights:
            continue
        if isinstance(module, nn.Embedding) and embedding_scale(module) is not None:
            rules.append((name, Table()))
        elif module is head and type(module) is nn.Linear:
            rules.append((name, Head()))
        else:
            return (), (f"{name}: it is whole on every rank, as it does more than look entries up",)
    return tuple(rules), ()


def _embeddings(model: nn.Module, side: str) -> nn.Module | None:
    try:
        found = getattr(model, f"get_{side}_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # a tower of images has neither
        return None
    return (
        found
        if isinstance(found, nn.Embedding) or (side == "output" and isinstance(found, nn.Linear))
        else None
    )


# ---- the whole plan ----


def _checked(model: nn.Module, policy: DerivedPolicy, context: CutContext) -> DerivedPolicy:
    """``policy`` without what does not fit into the whole model."""
    parts = context.mesh.group_size(*context.tp.inner.dims[-1])

    def refusal(tried: DerivedPolicy) -> str:
        try:
            if policy.inputs is not None:
                trace(model, list(tried.matches(model)), context, policy.inputs)
        except ValueError as error:
            return str(error)
        return ""

    def demoted(p: PlannedBranch, why: str) -> PlannedBranch:
        return _gathered(model, p.branch, p.kind, parts, why) if p.state == CUT else p

    if not refusal(policy):
        return policy
    reasons = {
        kind: refusal(replace(policy, outside=(), planned=tuple(p for p in policy.planned if p.kind == kind)))
        for kind in dict.fromkeys(p.kind for p in policy.planned)
    }
    policy = replace(
        policy, planned=tuple(demoted(p, reasons[p.kind]) if reasons[p.kind] else p for p in policy.planned)
    )
    if not (why := refusal(policy)):
        return policy
    if not refusal(
        without := replace(policy, outside=(), notes=(*policy.notes, f"the table and the head: {why}"))
    ):
        return without
    policy = replace(policy, planned=tuple(demoted(p, why) for p in policy.planned))
    return policy if not refusal(policy) else replace(policy, outside=())
