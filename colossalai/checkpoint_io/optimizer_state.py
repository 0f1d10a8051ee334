"""Collect the states of an optimizer by the names of its parameters, and load them from a checkpoint.

A state that has the shape of its parameter lies as the parameter does; any other is a number, or belongs to a
whole parameter.
Groups are known by their parameters: a pipeline stage has some of each group, and under another plan others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.checkpoint_io.held_tensors import (
    HeldTensor,
    pieces_of_holding,
    serial_shape,
    shared_mark,
    whole_piece,
)
from colossalai.checkpoint_io.json_values import encode
from colossalai.checkpoint_io.model_state import ParameterNames
from colossalai.checkpoint_io.runs.manifest import Manifest, StoredTensor
from colossalai.checkpoint_io.runs.reading import Want
from colossalai.checkpoint_io.stored_optimizer import StoredGroup, StoredOptimizer
from colossalai.interface import Holding, OptimizerWrapper
from colossalai.interface.holding import MASTERS_KEY
from colossalai.nn.optimizer.base import MultiTensorOptimizer, is_cut, local, wide
from colossalai.utils.lazy_tensor import fetch_later, is_lazy
from colossalai.utils.optimizer_state import KIND

MASTER = "master"
# Classes that keep the same states for the same purpose, so that each goes on where another stopped.
FAMILIES = {
    **dict.fromkeys(("Adam", "AdamW", "FusedAdam", "HybridAdam", "CPUAdam"), "Adam"),
    **dict.fromkeys(("Lamb", "FusedLAMB"), "Lamb"),
    **dict.fromkeys(("SGD", "FusedSGD"), "SGD"),
}
# Options of torch that say how a step is computed, not what: those of the running job stay.
MEANS = ("foreach", "fused", "capturable", "differentiable")

States = dict[str, dict[str, StoredTensor]]


class OptimizerState:
    """An optimizer for a checkpoint; ``model`` names its parameters."""

    def __init__(self, optimizer: Optimizer, model: ParameterNames, section: str = "optimizer") -> None:
        self.section, self.model = section, model
        self.optimizer = optimizer
        self._lock = threading.Lock()
        self.raw = optimizer.unwrap() if isinstance(optimizer, OptimizerWrapper) else optimizer
        self.holdings = [(self._name(holding), holding) for holding in holdings_of(optimizer)]

    def _name(self, holding: Holding) -> str:
        name = self.model.name(holding.param)
        if name is None:
            raise ValueError(
                f"the optimizer ({type(self.raw).__name__}) holds a parameter of shape"
                f" {tuple(holding.param.shape)} that is not"
                " in the model, so its state has no name in a checkpoint; put the module that has it, such as"
                " a criterion, inside the model"
            )
        return name

    # Saving

    def entries(self) -> list[HeldTensor]:
        """The states that are tensors, and fp32 masters."""
        found = []
        for name, holding in self.holdings:
            if holding.is_master:
                found.append(self._entry(name, MASTER, holding, holding.value))
            for state, value in self._states(holding).items():
                if isinstance(value, Tensor) or callable(value):
                    found.append(self._entry(name, state, holding, value))
        return found

    def _states(self, holding: Holding) -> dict[str, Any]:
        """The states of a parameter; a function stands for one that is computed, or read from a disk."""
        if isinstance(self.raw, MultiTensorOptimizer):
            states = self.raw.lazy_state(holding.value)
        else:
            states = {key: fetch_later(value) for key, value in self.raw.state.get(holding.value, {}).items()}
        return {key: partial(self._read, v) if callable(v) else v for key, v in states.items()}

    def _read(self, read: Callable[[], Tensor]) -> Tensor:
        with self._lock:  # files are written by several threads
            return read()

    def _entry(
        self, name: str, state: str, holding: Holding, value: Tensor | Callable[[], Tensor]
    ) -> HeldTensor:
        full = f"{self.section}/{name}/{state}"
        shared, stage = shared_mark(holding.param), self.model.stage
        if not isinstance(value, Tensor):
            pieces = pieces_of_holding(holding, value, self.model.mesh, full)
            return HeldTensor(full, serial_shape(holding.param), wide(holding.value), pieces, shared, stage)
        if value.shape == holding.value.shape:
            pieces = pieces_of_holding(holding, value, self.model.mesh, full)
            return HeldTensor(full, serial_shape(holding.param), value.dtype, pieces, shared, stage)
        if value.numel() != 1 and (is_cut(holding.param) or holding.end is not None):
            raise ValueError(
                f"{full} has shape {tuple(value.shape)}: it is neither a number nor like the parameter,"
                f" {tuple(holding.value.shape)},"
                " which is cut over ranks, so nothing says what it is a part of"
            )
        return HeldTensor(full, tuple(value.shape), value.dtype, whole_piece(value), shared, stage)

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """The options of each group, and its parameters."""
        found, at = [], 0
        for group in self.optimizer.param_groups:
            count = len(group["params"])
            options = {key: value for key, value in group.items() if key != "params"}
            found.append((options, [name for name, _ in self.holdings[at : at + count]]))
            at += count
        return found

    def plain_states(self) -> dict[str, dict[str, Any]]:
        """The states that are no tensors, of the parameters of this rank."""
        found = {}
        for name, holding in self.holdings:
            states = self._states(holding).items()
            plain = {k: v for k, v in states if not isinstance(v, Tensor) and not callable(v)}
            if plain:
                found[name] = plain
        return found

    def stored(self) -> StoredOptimizer:
        """What this rank tells of the optimizer, without the states that are tensors."""
        wrapped = self.optimizer
        return StoredOptimizer(
            [StoredGroup(options, names) for options, names in self.groups()],
            self.plain_states(),
            wrapped.other_state() if isinstance(wrapped, OptimizerWrapper) else {},
            [MASTERS_KEY] if any(holding.is_master for _, holding in self.holdings) else [],
            [name for name, holding in self.holdings if self._states(holding).keys() - {MASTER}],
            type(self.raw).__name__,
            self._family,
            not self.model.are_numbers,
            {name: self.model.stages[name] for name, _ in self.holdings if name in self.model.stages},
        )

    @property
    def _family(self) -> str:
        """Return the known class that a subclass belongs to."""
        names = [cls.__name__ for cls in type(self.raw).__mro__]
        return next((FAMILIES[name] for name in names if name in FAMILIES), names[0])

    # Loading

    def fresh(self) -> StoredOptimizer:
        """Describe this optimizer as it is before its first step: its own options, and no states."""
        return replace(self.stored(), states={}, stepped=[])

    def wants(
        self, manifest: Manifest, saved: StoredOptimizer, strict: bool = True
    ) -> tuple[list[Want], Callable[[], None]]:
        """Return what is read from a checkpoint, and a function that then puts it into the optimizer.

        Before that function is called, nothing of the optimizer is changed.

        Without ``strict``, parameters that the saved optimizer does not know start without states.
        """
        self._check_kind(saved)
        stored = self._stored(manifest)
        options = self.options_from(saved, manifest, strict)
        self._check_states(saved, stored, manifest, strict)
        wants: list[Want] = []
        loaded: dict[Tensor, dict[str, Any]] = {}
        for name, holding in self.holdings:
            key = self.stored_name(name, manifest)
            states: dict[str, Any] = {}
            for state, source in self._sources(holding, key, stored, manifest).items():
                target = self._target(holding, state, source)
                if target is not None:
                    if target is not holding.value:
                        states[state] = target
                    wants.append(self._want(holding, source, target))
            states |= {} if holding.is_empty else saved.states.get(key, {})
            loaded[holding.value] = states
        return wants, lambda: self._commit(loaded, options, saved)

    def _check_kind(self, saved: StoredOptimizer) -> None:
        kind, own = saved.kind, type(self.raw).__name__
        if kind not in (None, own) and (saved.family or FAMILIES.get(str(kind), kind)) != self._family:
            raise RuntimeError(
                f"the saved states are those of {kind}, and the optimizer is {own}, which keeps others. Boost"
                f" the model with {kind}; or"
                f" take the weights alone, with colossalai ckpt convert and booster.load_model"
            )

    def _stored(self, manifest: Manifest) -> States:
        """The stored states; those of a tied parameter by the name under which its weight is stored."""
        found: States = {}
        for name, states in stored_states(manifest, self.section).items():
            found.setdefault(self.stored_name(name, manifest), {}).update(states)
        return found

    def _check_states(self, saved: StoredOptimizer, stored: States, manifest: Manifest, strict: bool) -> None:
        """Refuse a checkpoint that lacks the states of a parameter that had some when it was saved."""
        had = {self.stored_name(name, manifest) for name in saved.stepped}
        has = {name for name, states in stored.items() if states.keys() - {MASTER}} | saved.states.keys()
        own = {self.stored_name(name, manifest) for name, _ in self.holdings}
        if strict and (lost := sorted((had & own) - has)):
            raise RuntimeError(
                f"it lacks the optimizer states of {', '.join(lost[:6])}, which had some when it was saved;"
                " strict=False starts without"
                " states for them"
            )

    def _sources(
        self, holding: Holding, key: str, stored: States, manifest: Manifest
    ) -> dict[str, StoredTensor]:
        """Find the stored states of a parameter; for a master that is not stored, its weight."""
        if holding.is_empty:
            return {}
        found = dict(stored.get(key, {}))
        in_state = isinstance(self.raw, MultiTensorOptimizer) and wide(holding.value) != holding.value.dtype
        if holding.is_master or (in_state and found):
            weight = manifest.find(f"{self.model.section}/{key}")
            if weight is not None:
                found.setdefault(MASTER, weight)
        return found

    def _want(self, holding: Holding, source: StoredTensor, target: Tensor) -> Want:
        if source.shape == serial_shape(holding.param) and target.shape == holding.value.shape:
            return Want(source, pieces_of_holding(holding, target, self.model.mesh, source.name))
        return Want(source, whole_piece(target))

    def _target(self, holding: Holding, state: str, source: StoredTensor) -> Tensor | None:
        """Return the tensor that a stored state is read to; None if this plan has no use for it."""
        value = holding.value
        if state == MASTER:
            if holding.is_master:
                return value
            if not isinstance(self.raw, MultiTensorOptimizer) or wide(value) == value.dtype:
                return None  # the weight itself has all digits
        own = self.raw.state.get(value, {}).get(state)
        if source.shape != serial_shape(holding.param):
            if source.shape and (is_cut(holding.param) or holding.end is not None):
                raise RuntimeError(
                    f"{source.name} has shape {source.shape}, and its parameter {serial_shape(holding.param)}"
                    " is cut over ranks"
                    " here, so nothing says what part of it is needed"
                )
            return torch.empty(source.shape, dtype=source.dtype, device=self._device(holding, source))
        dtype = source.dtype
        if dtype.is_floating_point:
            dtype = wide(value) if isinstance(self.raw, MultiTensorOptimizer) else value.dtype
        if isinstance(own, Tensor) and own.shape == value.shape and own.dtype == dtype and not is_lazy(own):
            return own
        return torch.empty_like(value, dtype=dtype, requires_grad=False)

    def _device(self, holding: Holding, source: StoredTensor) -> torch.device | str:
        """torch keeps counters on the host, unless the whole step runs on the device."""
        group = next(g for g in self.optimizer.param_groups if any(p is holding.value for p in g["params"]))
        on_device = source.shape or group.get("capturable") or group.get("fused")
        return local(holding.value).device if on_device else "cpu"

    def options_from(
        self, saved: StoredOptimizer, manifest: Manifest, strict: bool = True
    ) -> list[dict[str, Any]]:
        """The stored options of each group of this optimizer."""
        groups = saved.groups
        home = {name: i for i, group in enumerate(groups) for name in group.params}
        found, at = [], 0
        for i, own in enumerate(self.optimizer.param_groups):
            names = [name for name, _ in self.holdings[at : at + len(own["params"])]]
            at += len(names)
            stored = [home.get(self.stored_name(name, manifest)) for name in names]
            if strict and None in stored:
                raise RuntimeError(
                    f"the saved optimizer does not know {names[stored.index(None)]}, which is in group {i} of"
                    " the optimizer;"
                    " strict=False starts without a state for it"
                )
            chosen = {number for number in stored if number is not None}
            if not names and i < len(groups):  # a stage that has nothing of this group
                chosen = {i}
            options = [groups[number].options for number in sorted(chosen)]
            if any(encode(other) != encode(options[0]) for other in options[1:]):
                apart = next(n for n, number in zip(names, stored, strict=True) if number != stored[0])
                raise RuntimeError(
                    f"group {i} of the optimizer holds {names[0]} and {apart}, which were saved in groups"
                    " with different options"
                    f" ({options[0]} and {options[1]}); put the parameters into the same groups as when they"
                    " were saved"
                )
            found.append(self._checked(i, own, options[0] if options else {}))
        return found

    def _checked(self, i: int, own: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        has, needs = ([name for name in KIND if name in group] for group in (options, own))
        if options and has != needs:
            raise RuntimeError(
                f"the saved state is of another kind of optimizer: the options of its group {i} are"
                f" {', '.join(options)}; but"
                f" {type(self.raw).__name__} has {', '.join(needs) or 'none of these'}"
            )
        return {key: value for key, value in options.items() if key not in MEANS}

    def stored_name(self, name: str, manifest: Manifest) -> str:
        """The name under which a tied parameter was stored."""
        section = self.model.section
        tied = manifest.ties.get(f"{section}/{name}")
        return name if tied is None else tied.removeprefix(f"{section}/")

    def _commit(
        self, loaded: dict[Tensor, dict[str, Any]], options: list[dict[str, Any]], saved: StoredOptimizer
    ) -> None:
        for value, states in loaded.items():
            self.raw.state.pop(value, None)
            if states:
                self.raw.state[value] = states
        for group, new in zip(self.optimizer.param_groups, options, strict=True):
            group.update(new)
        if isinstance(self.raw, MultiTensorOptimizer):
            self.raw.states_replaced()
        if isinstance(self.optimizer, OptimizerWrapper):
            self.optimizer.load_other_state(saved.other)
            self.optimizer.weights_loaded()


def holdings_of(optimizer: Optimizer) -> list[Holding]:
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer.holdings()
    return [Holding(p, p) for group in optimizer.param_groups for p in group["params"]]


def stored_states(manifest: Manifest, section: str) -> States:
    """The stored states of each parameter, by its name."""
    found: States = {}
    for tensor in manifest.below(f"{section}/"):
        name, _, state = tensor.name.removeprefix(f"{section}/").rpartition("/")
        found.setdefault(name, {})[state] = tensor
    return found


__all__ = ["OptimizerState", "holdings_of", "stored_states"]
