"""An optimizer in a file beside its model: torch's form, with the names of the parameters, so that stages find theirs.

torch numbers parameters in the order of the groups.  The stages of a pipeline count each for itself, so a file says which name has
which number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.files import same_memory
from colossalai.checkpoint_io.gathered import GatheredCheckpointIO
from colossalai.checkpoint_io.gathering import Gathering
from colossalai.checkpoint_io.manifest import Manifest
from colossalai.checkpoint_io.model_state import ModelState
from colossalai.checkpoint_io.numbered_optimizer import NumberedState
from colossalai.checkpoint_io.optimizer_state import MASTER, OptimizerState, merge_groups
from colossalai.checkpoint_io.ranks import Ranks
from colossalai.checkpoint_io.values import decode
from colossalai.interface import OptimizerWrapper
from colossalai.interface.holding import MASTERS_KEY

# In a file: the names of the parameters in each group of its optimizer.
NAMES = "optimizer_names"


def whole_optimizer(optimizer: Optimizer, model: nn.Module, io: GatheredCheckpointIO) -> dict[str, Any]:
    """For a file: the state of the serial optimizer, whole on rank 0, and the names in its groups.  Every rank calls it.

    An optimizer of more than ``model`` has no names there.
    """
    own = ModelState(model)
    if any(own.name(p) is None for p in _params(optimizer)):
        numbered = NumberedState(optimizer)
        (states, _), *_ = [*io.optimizer_parts(numbered, float("inf")), ({}, 0.0)]
        return {"optimizer": numbered.state_dict(states)}
    found, names = _by_names(OptimizerState(optimizer, own), own, io.ranks)
    return {"optimizer": found, NAMES: names}


def _by_names(state: OptimizerState, own: ModelState, ranks: Ranks) -> tuple[dict[str, Any], list[list[str]]]:
    # with the weights, which say what a parameter is called that stages share
    gathering = Gathering(lambda: [*own.entries(), *state.entries()], ranks)
    ties = gathering.plan.ties
    merged = merge_groups(ranks.gather(state.merged()))
    names = [[n for n in g["params"] if f"model/{n}" not in ties] for g in merged["groups"]]
    numbers = {name: i for i, name in enumerate(name for group in names for name in group)}
    masters: set[str] = set().union(*ranks.gather({n for n, holding in state.holdings if holding.is_master}))
    states: dict[int, dict[str, Any]] = {
        numbers[n]: decode(v) for n, v in merged["states"].items() if n in numbers
    }
    wide: dict[int, Any] = {}
    for full in gathering.plan.tensors:
        if not full.startswith(f"{state.section}/"):
            continue
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        value = gathering.whole(full)
        if key == MASTER and name in masters:
            wide[numbers[name]] = value
        else:
            states.setdefault(numbers[name], {})[key] = value
    groups = [
        {**decode(group["options"]), "params": [numbers[n] for n in own_names]}
        for group, own_names in zip(merged["groups"], names, strict=True)
    ]
    wrapped = state.optimizer
    other = wrapped.other_state() if isinstance(wrapped, OptimizerWrapper) else {}
    found = {"state": {n: states[n] for n in sorted(states)}, "param_groups": groups, **other}
    return ({**found, MASTERS_KEY: wide} if wide else found), names


def own_optimizer(
    optimizer: Optimizer, model: nn.Module, file: dict[str, Any], io: GatheredCheckpointIO
) -> dict[str, Any]:
    """The state in ``file`` with the numbers that the parameters have on this rank, each cut as its parameter is.

    A file without names, of an older version, is numbered as the whole model.
    """
    saved: dict[str, Any] = file["optimizer"]
    known = ModelState(model)
    if any(known.name(p) is None for p in _params(optimizer)) and io.ranks.size == 1:
        return saved  # of another model: what does not fit is found by its shape
    state = OptimizerState(optimizer, known)
    names = file.get(NAMES) or _names_by_number(saved, state)
    groups = [
        {"options": {k: v for k, v in group.items() if k != "params"}, "params": own}
        for group, own in zip(saved["param_groups"], names, strict=True)
    ]
    manifest = Manifest({}, ties=_ties(file["model"], {n for group in names for n in group}))
    options = state.options_from(groups, manifest)
    flat = [n for group in saved["param_groups"] for n in group["params"]]
    numbers = dict(zip((n for group in names for n in group), flat, strict=True))
    by_own = {i: numbers[state.stored_name(name, manifest)] for i, (name, _) in enumerate(state.holdings)}

    def fitted(i: int, value: Any) -> Any:
        return io.fit(value, state.holdings[i][1].param)

    found: dict[str, Any] = {
        k: v for k, v in saved.items() if k not in ("state", "param_groups", MASTERS_KEY)
    }
    found["state"] = {
        i: {key: fitted(i, value) for key, value in saved["state"][number].items()}
        for i, number in by_own.items()
        if number in saved["state"]
    }
    if MASTERS_KEY in saved:
        wide = saved[MASTERS_KEY]
        found[MASTERS_KEY] = {i: fitted(i, wide[number]) for i, number in by_own.items() if number in wide}
    found["param_groups"] = _own_groups(state, options)
    return found


def _own_groups(state: OptimizerState, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of this rank's optimizer, numbered here, with the saved ``options``."""
    at, found = 0, []
    for (present, names), new in zip(state.groups(), options, strict=True):
        found.append({**present, **new, "params": list(range(at, at + len(names)))})
        at += len(names)
    return found


def _params(optimizer: Optimizer) -> list[Tensor]:
    if isinstance(optimizer, OptimizerWrapper):
        return [holding.param for holding in optimizer.holdings()]
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names_by_number(saved: dict[str, Any], state: OptimizerState) -> list[list[str]]:
    """The names of a file that has none: those of this rank, if its groups are as large."""
    sizes = [[len(group["params"]) for group in saved.get("param_groups", [])]]
    sizes.append([len(names) for _, names in state.groups()])
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the saved state is of other parameters: its groups hold {sizes[0]} of them, those of"
            f" {type(state.raw).__name__} {sizes[1]}"
        )
    return [names for _, names in state.groups()]


def _ties(weights: dict[str, Any], known: set[str]) -> dict[str, str]:
    """Further names, in a file, of the parameters that the optimizer ``known``: tensors of the same memory."""
    homes = {same_memory(weights[name]): name for name in known if isinstance(weights.get(name), Tensor)}
    found = {}
    for name, value in weights.items():
        home = homes.get(same_memory(value)) if isinstance(value, Tensor) else None
        if home is not None and home != name and name not in known:
            found[f"model/{name}"] = f"model/{home}"
    return found


__all__ = ["NAMES", "own_optimizer", "whole_optimizer"]
