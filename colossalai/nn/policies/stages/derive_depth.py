"""Derives where a model is cut in depth, for models without a row in a policy.

One forward pass on the meta device tells in which order modules are called: the blocks are the largest list
of like modules that is walked through in its order, and what is called before them makes the first hidden
states.  Autograd tells which parameters are behind what else a block is given: all stages hold these.
Whether stages that are made so compute what the model does is tried with random weights afterwards
(``colossalai.pipeline.split``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.nn.policies.stages.depth import Depth
from colossalai.nn.policies.trials.meta_inputs import in_evaluation, looking_at, meta_twin
from colossalai.nn.policies.trials.trace import Flow, find_inputs
from colossalai.nn.policies.trials.verify import Verification
from colossalai.nn.random_streams import draws_own


@dataclass
class Calls:
    """The modules of a model in the order of their calls, with what blocks were given and gave."""

    parameters: dict[int, str]
    order: list[str] = field(default_factory=list)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


def derive_depths(model: nn.Module) -> list[Depth]:
    """The blocks of ``model`` and its modules before them: what may be right, the likeliest and cheapest
    first; empty if it has no blocks that can be told.
    """
    calls = _follow(model)
    if calls is None:
        return []
    # models of timm have a Sequential; elsewhere these are small parts of blocks
    lists = _block_lists(model, calls, nn.ModuleList) or _block_lists(model, calls, nn.Sequential)
    if not lists:
        return []
    towers = _towers(lists)
    if towers:
        return [_of_towers(model, calls, towers)]
    largest = max(lists, key=lambda path: sum(p.numel() for p in model.get_submodule(path).parameters()))
    depth = _of_one_list(model, calls, largest)
    travels = _constants(calls, depth.formed)
    formed = (*depth.formed, largest) if _returns_values(calls, largest) else depth.formed
    dearer = replace(depth, travels=travels, formed=formed)
    return [depth] if dearer == depth else [depth, dearer]


def _returns_values(calls: Calls, blocks: str) -> bool:
    """Whether a block returns something that is no tensor, such as the sizes of what it returns."""
    leaves = tree_leaves(calls.outputs[f"{blocks}.0"])
    return any(value is not None and not isinstance(value, Tensor) for value in leaves)


def _constants(calls: Calls, paths: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The outputs of the modules at ``paths`` that have no gradients, and are not computed again without
    these modules: masks and orders that are drawn, tables of positions.
    """
    return tuple(
        (path, number)
        for path in paths
        for number, value in enumerate(tree_leaves(calls.outputs.get(path)))
        if isinstance(value, Tensor) and not value.requires_grad
    )


def _of_towers(model: nn.Module, calls: Calls, towers: list[str]) -> Depth:
    homes = [path.rpartition(".")[0] for path in towers]
    entry = dict.fromkeys(
        path[len(home) + 1 :] if path.startswith(f"{home}.") else path.rpartition(".")[2]
        for home, tower in zip(homes, towers, strict=True)
        for path in _before(model, calls, tower, home)
    )
    both = [_carries(calls, tower) for tower in towers]
    carries = tuple(a if a == b else None for a, b in zip(*(c[0] for c in both), strict=False))
    names = tuple(home.rpartition(".")[2] for home in homes)
    encoded = type(calls.outputs.get(homes[0]))
    return Depth(
        towers[0].rpartition(".")[2],
        tuple(entry),
        carries,
        names,
        both[0][1],
        encoded=encoded if "last_hidden_state" in getattr(encoded, "__dataclass_fields__", ()) else None,
    )


def _of_one_list(model: nn.Module, calls: Calls, blocks: str) -> Depth:
    carries, as_tuple = _carries(calls, blocks)
    shared = _shared(model, calls, blocks)
    entry = tuple(path for path in _before(model, calls, blocks, "") if path not in shared)
    count = len(list(model.get_submodule(blocks).children()))
    repeats = tuple(calls.order.count(f"{blocks}.{i}") for i in range(count))
    return Depth(
        blocks,
        entry,
        carries,
        as_tuple=as_tuple,
        shared=shared,
        formed=tuple(path for path in entry if not _is_hidden(calls, path, blocks)),
        repeats=repeats if max(repeats) > 1 else (),
    )


def _follow(model: nn.Module) -> Calls | None:
    with looking_at(model):
        found = find_inputs(model)
        if found is not None:
            inputs, truth = found
            inputs = {name: value for name, value in inputs.items() if name != "output_attentions"}
            return _record(meta_twin(model), inputs, Flow(draws_own, truth))
    # code that reads values
    whole = Verification(model, weightless=True)
    if whole.inputs is None or whole.model is model:
        return None
    return _record(whole.model, whole.inputs, in_evaluation(whole.model))


def _record(twin: nn.Module, inputs: dict[str, Any], inside: AbstractContextManager[Any]) -> Calls:
    calls = Calls({id(p): name for name, p in twin.named_parameters()})
    for param in twin.parameters():
        param.requires_grad_(param.is_floating_point())  # also of a frozen model it is asked what it makes
    with torch.enable_grad(), ExitStack() as stack:
        for name, module in twin.named_modules():
            enter, leave = _hooks(name, calls)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(inside)
        twin(**inputs)
    return calls


def _hooks(name: str, calls: Calls) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.order.append(name)
        names = inspect.signature(module.forward).parameters
        calls.given[name] = {**dict(zip(names, args, strict=False)), **kwargs}

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.outputs[name] = output

    return enter, leave


def _block_lists(model: nn.Module, calls: Calls, kind: type[nn.Module]) -> list[str]:
    """Lists, of the ``kind``, of like modules that were walked through in their order, each called once or
    several times in a row; of nested ones the outer.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, kind) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        paths = [f"{name}.{i}" for i in range(len(module._modules))]
        walked = [path for path in calls.order if path in set(paths)]
        in_order = list(dict.fromkeys(walked)) == paths and walked == sorted(walked, key=paths.index)
        if len({type(block) for block in module.children()}) == 1 and in_order and len(walked) > 1:
            found.append(name)
    return sorted(found, key=lambda path: calls.order.index(f"{path}.0"))


def _towers(lists: list[str]) -> list[str]:
    """Two lists of the same name in neighbouring modules, an encoder and then a decoder; other lists, such as
    the convolutions before an encoder, may be there too.
    """
    for one, other in combinations(lists, 2):
        (first, a), (second, b) = (path.rpartition(".")[::2] for path in (one, other))
        siblings = first.rpartition(".")[0] == second.rpartition(".")[0] and first != second
        named = "encoder" in first.rpartition(".")[2] and "decoder" in second.rpartition(".")[2]
        if a == b and siblings and named:
            return [one, other]
    return []


def _before(model: nn.Module, calls: Calls, blocks: str, home: str) -> list[str]:
    """Outermost modules with tensors of their own that were called before ``blocks``, since ``home`` was."""
    start = calls.order.index(home) if home in calls.order else 0
    found: list[str] = []
    for path in calls.order[start : calls.order.index(f"{blocks}.0")]:
        if not path or f"{blocks}.".startswith(f"{path}.") or path in found:
            continue
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        if any(True for _ in model.get_submodule(path).state_dict()):
            found.append(path)
    return [*found, *_twins(model, calls, found)]


def _twins(model: nn.Module, calls: Calls, entry: list[str]) -> list[str]:
    """Modules that were not called and hold parameters of ``entry``, such as a table under a second name."""
    held = {id(p) for path in entry for p in model.get_submodule(path).parameters()}
    called = set(calls.order)
    return [
        name
        for name, module in model.named_modules()
        if name not in called and any(id(p) in held for p in module._parameters.values())
    ]


def _carries(calls: Calls, blocks: str) -> tuple[tuple[str | None, ...], bool]:
    """What a block returns after the hidden states, by the names of the next one's arguments, and whether it
    returns a tuple or a list.
    """
    output, following = calls.outputs[f"{blocks}.0"], calls.given.get(f"{blocks}.1", {})
    if not isinstance(output, tuple | list):
        return (), False
    names = [
        next((name for name, given in following.items() if given is value), None)
        if isinstance(value, Tensor)
        else None
        for value in output[1:]
    ]
    return tuple(names), True


def _hidden(calls: Calls, blocks: str) -> Any:
    """What the first block was given first."""
    return next(iter(calls.given[f"{blocks}.0"].values()), None)


def _is_hidden(calls: Calls, path: str, blocks: str) -> bool:
    """Whether the module at ``path``, if it was called, has returned a tensor in the form of the hidden
    states.
    """
    hidden = _hidden(calls, blocks)
    output = calls.outputs.get(path, hidden)
    return isinstance(output, Tensor) and isinstance(hidden, Tensor) and output.shape == hidden.shape


def _shared(model: nn.Module, calls: Calls, blocks: str) -> tuple[str, ...]:
    """Modules whose parameters all blocks are given something of, beside the hidden states, and parameters
    of modules that hold ``blocks``.
    """
    own = _behind(calls, _hidden(calls, blocks))
    found: list[str] = []
    for given in list(calls.given.get(f"{blocks}.1", {}).values())[1:]:
        names = _behind(calls, given)
        if names.isdisjoint(own) and not any(name.startswith(f"{blocks}.") for name in names):
            found += [name.rpartition(".")[0] for name in sorted(names)]
    found += [
        f"{home}.{name}" if home else name
        for home in _homes(blocks)
        for name, _ in model.get_submodule(home).named_parameters(recurse=False)
    ]
    return tuple(dict.fromkeys(found))


def _homes(path: str) -> list[str]:
    """The paths of the modules that hold the one at ``path``, from the model on."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def _behind(calls: Calls, value: Any) -> set[str]:
    """The names of the parameters that a tensor was computed from, which autograd knows."""
    if not isinstance(value, Tensor):
        return set()
    if id(value) in calls.parameters:
        return {calls.parameters[id(value)]}
    found, seen, waiting = set(), set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(leaf := getattr(node, "variable", None)) in calls.parameters:
            found.add(calls.parameters[id(leaf)])
        waiting += [following for following, _ in node.next_functions]
    return found
