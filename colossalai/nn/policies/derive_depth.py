"""Derives where a model is cut in depth, for models without a row in a policy.

One forward pass on the meta device tells in which order modules are called: the blocks are the largest list
of like modules that is walked through once, in its order, and what is called before them makes the first
hidden states.  Whether stages that are made so compute what the model does is tried with its own numbers
afterwards (``colossalai.pipeline.split``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colossalai.nn.policies.depth import Depth
from colossalai.nn.policies.meta_inputs import looking_at, meta_twin
from colossalai.nn.policies.random_streams import draws_own
from colossalai.nn.policies.trace import Flow, find_inputs


@dataclass
class Calls:
    """The modules of a model in the order of their calls, with what blocks were given and gave."""

    order: list[str] = field(default_factory=list)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


def derive_depth(model: nn.Module) -> Depth | None:
    """The blocks of ``model`` and its modules before them; None if it has none that can be told."""
    calls = _follow(model)
    if calls is None:
        return None
    lists = _block_lists(model, calls)
    if not lists:
        return None
    towers = _towers(lists)
    if towers:
        homes = [path.rpartition(".")[0] for path in towers]
        blocks = towers[0].rpartition(".")[2]
        entry = dict.fromkeys(
            path[len(home) + 1 :] if path.startswith(f"{home}.") else path.rpartition(".")[2]
            for home, tower in zip(homes, towers, strict=True)
            for path in _before(model, calls, tower, home)
        )
        both = [_carries(calls, tower) for tower in towers]
        shared = tuple(a if a == b else None for a, b in zip(*(c[0] for c in both), strict=False))
        names = tuple(home.rpartition(".")[2] for home in homes)
        return Depth(blocks, tuple(entry), shared, names, both[0][1])
    largest = max(lists, key=lambda path: sum(p.numel() for p in model.get_submodule(path).parameters()))
    carries, as_tuple = _carries(calls, largest)
    return Depth(largest, tuple(_before(model, calls, largest, "")), carries, (), as_tuple)


def _follow(model: nn.Module) -> Calls | None:
    with looking_at(model):
        found = find_inputs(model)
        if found is None:
            return None
        inputs, truth = found
        inputs = {name: value for name, value in inputs.items() if name != "output_attentions"}
        calls, twin = Calls(), meta_twin(model)
        with ExitStack() as stack:
            for name, module in twin.named_modules():
                enter, leave = _hooks(name, calls)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            with Flow(draws_own, truth):
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


def _block_lists(model: nn.Module, calls: Calls) -> list[str]:
    """Lists of like modules that were walked through once, in their order; of nested ones the outer."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        paths = [f"{name}.{i}" for i in range(len(module))]
        walked = [path for path in calls.order if path in set(paths)]
        if len({type(block) for block in module}) == 1 and walked == paths:
            found.append(name)
    return sorted(found, key=lambda path: calls.order.index(f"{path}.0"))


def _towers(lists: list[str]) -> list[str]:
    """Two lists of the same name in neighbouring modules, an encoder and then a decoder."""
    if len(lists) != 2:
        return []
    (first, a), (second, b) = (path.rpartition(".")[::2] for path in lists)
    siblings = first.rpartition(".")[0] == second.rpartition(".")[0] and first != second
    named = "encoder" in first.rpartition(".")[2] and "decoder" in second.rpartition(".")[2]
    return lists if a == b and siblings and named else []


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
    returns a tuple.
    """
    output, following = calls.outputs[f"{blocks}.0"], calls.given[f"{blocks}.1"]
    if not isinstance(output, tuple):
        return (), False
    names = [
        next((name for name, given in following.items() if given is value), None)
        if isinstance(value, Tensor)
        else None
        for value in output[1:]
    ]
    return tuple(names), True
