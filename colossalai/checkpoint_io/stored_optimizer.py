"""``StoredOptimizer``: the one stored form of an optimizer's state, by the names of the parameters.

A run keeps it in its manifest; tensors are boxes there, and only the other values are here.  A file of its
own has torch's form: states and groups by the numbers of the parameters, which follow from the names, and the
names beside them.  So plain PyTorch loads the file, and a pipeline stage, which numbers its own parameters
only, finds these by name.  A file without names (of an optimizer that was never boosted, or of an older
version) knows its parameters by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from colossalai.checkpoint_io.json_values import decode, encode

# In a file: the names of the parameters in each group.
NAMES = "optimizer_names"
# Beside the shards of a file: states that torch's form keeps beside "state", such as fp32 masters.
SPREAD = "spread_over_states"

States = dict[str, dict[str, Any]]
NumberedStates = Mapping[Any, Mapping[str, Any]]


@dataclass
class StoredGroup:
    """The options of a parameter group, and the names of its parameters."""

    options: dict[str, Any]
    params: list[str]


@dataclass
class StoredOptimizer:
    """The state of the serial optimizer.

    Args:
        states: of each parameter by its name; in a manifest without tensors.
        other: what belongs to no parameter (a loss scale).
        beside: the keys of ``states`` that torch's form keeps beside ``"state"``, each a dict by number.
        stepped: the parameters that had states when they were saved.
        kind: the class of the optimizer.
        family: the classes that keep the same states.
        has_names: whether the names are those of a model; else they are numbers.
        stages: the virtual pipeline stage of each parameter, which tells the order in the serial model.
    """

    groups: list[StoredGroup]
    states: States = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    stepped: list[str] = field(default_factory=list)
    kind: str | None = None
    family: str | None = None
    has_names: bool = True
    stages: dict[str, int] = field(default_factory=dict)
    _by_number: dict[Any, str] = field(default_factory=dict, repr=False)

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter in torch's form."""
        return {name: i for i, name in enumerate(name for group in self.groups for name in group.params)}

    # Several ranks

    @classmethod
    def merge(cls, parts: Sequence[StoredOptimizer]) -> StoredOptimizer:
        """The optimizer of the whole model from what each rank tells of its part.

        Groups of the same place and the same options are one; its parameters follow the order of the pipeline
        stages.
        """
        first = parts[0]
        groups: list[tuple[int, StoredGroup, Any]] = []
        found = cls([], other=first.other, kind=first.kind, family=first.family, has_names=first.has_names)
        for part in parts:
            for i, group in enumerate(part.groups):
                options = encode(group.options)  # tensors can be compared so
                home = next((g for j, g, own in groups if j == i and own == options), None)
                if home is None:
                    home = StoredGroup(group.options, [])
                    groups.append((i, home, options))
                known = set(home.params)
                home.params += [name for name in group.params if name not in known]
            found.states = {**part.states, **found.states}
            for name, stage in part.stages.items():
                found.stages[name] = min(stage, found.stages.get(name, stage))
        found.groups = [group for _, group, _ in sorted(groups, key=lambda item: item[0])]
        for group in found.groups:
            group.params.sort(key=lambda name: found.stages.get(name, 0))
        found.stepped = sorted({name for part in parts for name in part.stepped})
        found.beside = sorted({key for part in parts for key in part.beside})
        return found

    # In a manifest

    def as_values(self, section: str = "optimizer") -> dict[str, Any]:
        """What a manifest keeps, without tensors, as values for JSON."""
        groups = [
            {"options": encode(group.options, "an option of the optimizer"), "params": group.params}
            for group in self.groups
        ]
        return {
            "kind": self.kind,
            "family": self.family,
            "other": encode(self.other, section),
            "groups": groups,
            "states": encode(self.states, section),
            "stepped": self.stepped,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], section: str = "optimizer") -> StoredOptimizer:
        """Undo ``as_values``."""
        groups = [StoredGroup(decode(group["options"]), list(group["params"])) for group in values["groups"]]
        return cls(
            groups,
            decode(values["states"], section),
            decode(values.get("other", {}), section),
            stepped=list(values.get("stepped", ())),
            kind=values.get("kind"),
            family=values.get("family"),
        )

    # In torch's form

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the serial optimizer, with the names of its parameters if it has some."""
        states, beside = {}, {key: dict[int, Any]() for key in self.beside}
        for number, state in self.numbered(self.states).items():
            own = {key: value for key, value in state.items() if key not in beside}
            if own or not state:
                states[number] = own
            for key in beside.keys() & state.keys():
                beside[key][number] = state[key]
        return {"state": states, **self._rest(), **beside}

    def groups_file(self) -> dict[str, Any]:
        """The file beside shards of ``numbered`` states: all the rest."""
        return {**self._rest(), **({SPREAD: self.beside} if self.beside else {})}

    def numbered(self, states: States) -> dict[Any, dict[str, Any]]:
        """Some states, by the numbers of the parameters, in their order."""
        numbers = self.numbers
        ordered = {i: states[name] for name, i in numbers.items() if name in states}
        return ordered | {name: state for name, state in states.items() if name not in numbers}

    def _rest(self) -> dict[str, Any]:
        numbers = self.numbers
        groups = [{**group.options, "params": [numbers[n] for n in group.params]} for group in self.groups]
        names = {NAMES: [group.params for group in self.groups]} if self.has_names else {}
        return {"param_groups": groups, **self.other, **names}

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Any], names: Sequence[Sequence[str]] | None = None
    ) -> StoredOptimizer:
        """Undo ``state_dict``; ``names`` of the parameters are those that it holds, unless they are given."""
        found, parts = cls.open_state_dict(state_dict, names)
        for part in parts:
            found.add(part)
        return found

    @classmethod
    def open_state_dict(
        cls, state_dict: Mapping[str, Any], names: Sequence[Sequence[str]] | None = None
    ) -> tuple[StoredOptimizer, list[NumberedStates]]:
        """Return a state dict without its states, and the states, which ``add`` takes."""
        beside = [key for key, value in state_dict.items() if key != "state" and _is_by_parameter(value)]
        rest = {key: value for key, value in state_dict.items() if key != "state" and key not in beside}
        found = cls.from_groups_file(rest, names)
        found.beside = beside
        parts = [{int(n): {key: value} for n, value in state_dict[key].items()} for key in beside]
        return found, [state_dict.get("state", {}), *parts]

    @classmethod
    def from_groups_file(
        cls, rest: Mapping[str, Any], names: Sequence[Sequence[str]] | None = None
    ) -> StoredOptimizer:
        """Undo ``groups_file``; the states are given to ``add``."""
        if "param_groups" not in rest:
            raise ValueError(
                "this is not the state of an optimizer: it holds"
                f" {', '.join(map(str, rest)) or 'nothing'}, and no param_groups"
            )
        names = names or rest.get(NAMES)
        numbered = [list(group["params"]) for group in rest["param_groups"]]
        if names is not None and [len(own) for own in names] != [len(own) for own in numbered]:
            raise ValueError(
                f"its groups hold {[len(own) for own in numbered]} parameters, and it names"
                f" {[len(own) for own in names]}"
            )
        places = count()
        own_names = names or [[str(next(places)) for _ in own] for own in numbered]
        groups = [
            StoredGroup({k: v for k, v in group.items() if k != "params"}, list(own))
            for group, own in zip(rest["param_groups"], own_names, strict=True)
        ]
        other = {k: v for k, v in rest.items() if k not in ("param_groups", NAMES, SPREAD)}
        found = cls(groups, other=other, beside=list(rest.get(SPREAD, [])), has_names=names is not None)
        found._by_number = {
            number: name
            for own, group in zip(numbered, groups, strict=True)
            for number, name in zip(own, group.params, strict=True)
        }
        return found

    def add(
        self,
        states: NumberedStates,
        take: Callable[[str, Any], Any] = lambda name, value: value,
        is_wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Add states by the numbers of a file; ``take`` gives what of a parameter's value is kept."""
        for number, state in states.items():
            # an optimizer may keep states of its own, of no parameter
            name = self._by_number.get(number) or number
            if is_wanted(name):
                own = {key: take(name, value) for key, value in state.items()}
                self.states.setdefault(name, {}).update(own)


def _is_by_parameter(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(number, int) and isinstance(item, Tensor) for number, item in value.items())
    )


__all__ = ["NAMES", "NumberedStates", "States", "StoredGroup", "StoredOptimizer"]
