"""Gather whole tensors from the pieces of all ranks, one at a time, on the first rank; load a rank's part.

Checkpoints of runs never need this; files in the layout of Hugging Face, and files of one piece, hold whole
tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.assembly import assemble
from colossalai.checkpoint_io.boxes import Box, whole
from colossalai.checkpoint_io.files.sharding import MB, plan_shards, shard_checkpoint
from colossalai.checkpoint_io.files.state_file import same_memory
from colossalai.checkpoint_io.held_tensors import HeldBox, HeldTensor
from colossalai.checkpoint_io.model_state import ParameterNames
from colossalai.checkpoint_io.optimizer_state import MASTER, OptimizerState, holdings_of
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.runs.manifest import Manifest
from colossalai.checkpoint_io.stored_optimizer import NumberedStates, States, StoredGroup, StoredOptimizer
from colossalai.checkpoint_io.write_plan import make_write_plan, outline
from colossalai.interface import OptimizerWrapper
from colossalai.interface.attached import attach, attached
from colossalai.interface.holding import MASTERS_KEY
from colossalai.utils.parallel import launched_mesh

Part = tuple[dict[str, Tensor | None], float]


class Gathering:
    """The tensors that all ranks hold together.

    Every rank makes one, and asks for the same tensors in the same order.
    """

    def __init__(self, collect: Callable[[], Sequence[HeldTensor]], ranks: JobRanks) -> None:
        self.ranks = ranks
        entries, failure = list[HeldTensor](), None
        try:
            entries = list(collect())
        except Exception as error:
            failure = error
        self.plan = make_write_plan(ranks.agree(failure, outline(entries)))
        self._pieces: dict[str, list[HeldBox]] = {}
        for entry in entries:
            self._pieces.setdefault(self.stored_name(entry.name), []).extend(entry.pieces)
        self._aliases: dict[str, list[str]] = {}
        for alias, name in self.plan.ties.items():
            self._aliases.setdefault(name, []).append(alias)

    def stored_name(self, name: str) -> str:
        return name if name in self.plan.tensors else self.plan.ties[name]

    def whole(self, name: str) -> Tensor | None:
        """All of a tensor on the CPU of the first rank; None on the others, which send what it lacks."""
        logical = self.plan.tensors[name]
        sources = [
            (box, 0 if 0 in holders else holders[0]) for box, holders in sorted(logical.holders.items())
        ]
        return assemble(logical.shape, logical.dtype, sources, partial(self._read, name), self.ranks.group)

    def _read(self, name: str, box: Box) -> Tensor:
        return next(p for p in self._pieces[name] if p.box.holds(box)).read_part(box)

    def size(self, name: str) -> float:
        """In MB."""
        logical = self.plan.tensors[name]
        return whole(logical.shape).numel * logical.dtype.itemsize / MB

    def parts(self, max_size: float) -> Iterator[Part]:
        """Gather all tensors in parts of at most ``max_size`` MB; tied names stay together."""
        units = [([name, *self._aliases.get(name, [])], self.size(name)) for name in self.plan.tensors]
        for names, size in plan_shards(units, max_size):
            found = {name: self.whole(name) for name in names if name in self.plan.tensors}
            yield {name: found[self.stored_name(name)] for name in names}, size


# What of a value a parameter takes: ``fit`` of a ``CheckpointIO``.
Fit = Callable[[Any, Tensor | None], Any]
# Some states by the names of the parameters, and their size in MB.
StatesPart = tuple[States, float]


def remember_model(optimizer: Optimizer, model: nn.Module) -> None:
    """Let files of ``optimizer`` have the names of ``model``, as long as the model is there."""
    attach(_raw(optimizer), "model", weakref.ref(model))


def names_of(optimizer: Optimizer, model: nn.Module | None = None) -> ParameterNames:
    """The names of the parameters of ``optimizer`` in ``model``, by default the one that it was boosted with.

    If it has parameters that the model lacks, or there is no model, they are numbers.
    """
    if model is None:
        known = attached(_raw(optimizer), "model")
        model = None if known is None else known()
    params = [holding.param for holding in holdings_of(optimizer)]
    if model is not None:
        names = ParameterNames.of(model)
        if all(names.name(p) is not None for p in params):
            return names
    numbers = ((str(i), p) for i, p in enumerate(params))
    return ParameterNames(numbers, launched_mesh(), are_numbers=True)


def _raw(optimizer: Optimizer) -> Optimizer:
    return optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer


class OptimizerParts:
    """The state of the serial optimizer for a file: ``stored``, and in parts the states of its parameters."""

    def __init__(self, stored: StoredOptimizer, parts: Callable[[float], Iterator[StatesPart]]) -> None:
        self.stored, self.parts = stored, parts

    @classmethod
    def of_state_dict(cls, optimizer: Optimizer) -> OptimizerParts:
        """What ``state_dict`` of an optimizer gives, whose tensors are whole."""
        names = names_of(optimizer)
        known = None if names.are_numbers else [own for _, own in OptimizerState(optimizer, names).groups()]
        stored = StoredOptimizer.from_state_dict(optimizer.state_dict(), known)
        return cls(stored, lambda size: shard_checkpoint(stored.states, size))

    @classmethod
    def gathered(cls, optimizer: Optimizer, names: ParameterNames, ranks: JobRanks) -> OptimizerParts:
        """From the pieces of all ranks; each of them calls this, and goes through all parts."""
        _check_stages(names)
        state = OptimizerState(optimizer, names.agree(ranks))
        gathering = Gathering(state.entries, ranks)
        own = state.stored()
        has_stages = names.stage is not None
        told = ranks.gather(own if has_stages else replace(own, groups=[], other={}))
        stored = StoredOptimizer.merge(told)
        if not has_stages:  # each rank knows all groups, and the first one writes
            stored.groups, stored.other = own.groups, own.other
        masters: set[str] = set().union(*ranks.gather({n for n, h in state.holdings if h.is_master}))
        tensors: dict[str, dict[str, str]] = {name: {} for name in stored.states}
        for full in gathering.plan.tensors:
            name, _, key = full.removeprefix(f"{state.section}/").rpartition("/")
            key = MASTERS_KEY if key == MASTER and name in masters else key
            tensors.setdefault(name, {})[key] = full
        return cls(stored, partial(_gathered_parts, stored, gathering, tensors))

    def file(self, parts: Iterator[StatesPart]) -> dict[str, Any]:
        """One file with all ``parts``."""
        return replace(
            self.stored, states={n: own for part, _ in parts for n, own in part.items()}
        ).state_dict()

    def shards(self, parts: Iterator[StatesPart]) -> Iterator[tuple[dict[int, Any], float]]:
        """The shards of a folder; ``stored.groups_file`` is the rest."""
        return ((self.stored.numbered(part), size) for part, size in parts)


def _check_stages(names: ParameterNames) -> None:
    if names.are_numbers and names.stage is not None:
        raise ValueError(
            "an optimizer file without the names of a model numbers the parameters of the whole model, but"
            " each stage of a"
            " pipeline counts its own; boost the optimizer together with its model, or save the run with"
            " booster.save"
        )


def _gathered_parts(
    stored: StoredOptimizer,
    gathering: Gathering,
    tensors: Mapping[str, Mapping[str, str]],
    size_per_shard: float,
) -> Iterator[StatesPart]:
    numbers = stored.numbers
    ordered = sorted(tensors, key=lambda name: numbers[name])
    sizes = [([name], sum(map(gathering.size, tensors[name].values()))) for name in ordered]
    for names, size in plan_shards(sizes, size_per_shard):
        part = {
            name: {key: gathering.whole(full) for key, full in tensors[name].items()}
            | stored.states.get(name, {})
            for name in names
        }
        yield part, size


class OwnOptimizer:
    """An optimizer that is loaded from a file: what of the serial optimizer's state is for this rank.

    Parameters are found by their names, if file and optimizer have both and they differ; else by their
    numbers.

    Args:
        by_names: find them by names also where the numbers would do, and pass over parameters that are not
            here.
        ties: further names of stored parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: ParameterNames,
        stored: StoredOptimizer,
        *,
        by_names: bool = False,
        ties: Mapping[str, str] | None = None,
    ) -> None:
        self.state, self.stored = OptimizerState(optimizer, names), stored
        self._manifest = Manifest({}, ties={f"model/{a}": f"model/{b}" for a, b in (ties or {}).items()})
        self.by_names = stored.has_names and not names.are_numbers and (by_names or self._differs(names))
        if names.stage is not None and not self.by_names:
            raise ValueError(
                "the file knows its parameters by their numbers in the whole model, and each stage of a"
                " pipeline counts its own;"
                " save it once more by booster.save_optimizer of the boosted optimizer, which adds their"
                " names"
            )
        flat = [self.state.stored_name(name, self._manifest) for name, _ in self.state.holdings]
        self._stored_names = set(stored.numbers)
        self._sources = flat if self.by_names else list(stored.numbers)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._targets = dict(zip(self._sources, params, strict=False))

    def _differs(self, names: ParameterNames) -> bool:
        """Whether the parameters must be found by name.

        They must on a pipeline stage, which has a part of them, and where groups of the same sizes hold them
        in another order.
        """
        own = [group for _, group in self.state.groups()]
        stored = [group.params for group in self.stored.groups]
        alike = {n for group in own for n in group} == {n for group in stored for n in group}
        same_sizes = [len(group) for group in own] == [len(group) for group in stored]
        return names.stage is not None or (alike and same_sizes and own != stored)

    def state_dict(self, parts: Iterable[NumberedStates], fit: Fit) -> dict[str, Any]:
        """For ``load_state_dict`` of the optimizer: its states, as ``fit`` cuts them, by its own numbers."""
        groups = self._groups() if self.by_names else self.stored.groups
        for part in parts:
            self.stored.add(part, lambda name, value: fit(value, self._targets.get(name)), self._is_wanted)
        stored = self.stored
        states = stored.states
        if self.by_names:
            own = zip(self._sources, self.state.holdings, strict=True)
            others = {name: state for name, state in states.items() if name not in self._stored_names}
            states = others | {name: states[source] for source, (name, _) in own if source in states}
        return replace(stored, groups=groups, states=states, has_names=False).state_dict()

    def _is_wanted(self, name: str) -> bool:
        return not self.by_names or name in self._targets or name not in self._stored_names

    def _groups(self) -> list[StoredGroup]:
        try:
            options = self.state.options_from(self.stored, self._manifest)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return [
            StoredGroup({**present, **new}, names)
            for (present, names), new in zip(self.state.groups(), options, strict=True)
        ]


def ties_in(weights: Mapping[str, Any], known: Iterable[str]) -> dict[str, str]:
    """Further names, in a file, of the parameters ``known`` to its optimizer: tensors of the same memory."""
    known = set(known)
    homes = {same_memory(weights[name]): name for name in known if isinstance(weights.get(name), Tensor)}
    found = {}
    for name, value in weights.items():
        home = homes.get(same_memory(value)) if isinstance(value, Tensor) else None
        if home is not None and home != name and name not in known:
            found[name] = home
    return found
