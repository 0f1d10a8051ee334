"""The order in which a model's layers run, and the functions between them: what ``exec_seq`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from colossalai.pipeline.calls import Function
from colossalai.pipeline.partition import SPLIT_NODE

_SIDES = ("front", "behind")


@dataclass
class LayerStep:
    """One layer with the functions that go where it goes, before and after it."""

    name: str
    module: nn.Module
    front: list[Function] = field(default_factory=list)
    behind: list[Function] = field(default_factory=list)


def steps_of(model: nn.Module, exec_seq: Sequence[Any] | None) -> list[LayerStep]:
    """The layers of ``model`` in the order of ``exec_seq``; without one, in the order of their definition.

    ``exec_seq`` holds names of modules, such as ``"layer1.0"``, and functions.  ``(function, "front")`` goes
    with the layer after it, ``(function, "behind")`` and a function alone with the layer before it.
    """
    if exec_seq is None:
        return [LayerStep(name, module) for name, module in _defined(model)]
    modules = dict(model.named_modules())
    steps: list[LayerStep] = []
    waiting: list[Function] = []
    for item in exec_seq:
        if item == SPLIT_NODE:
            continue
        if isinstance(item, str):
            steps.append(LayerStep(item, _module(modules, item, model), front=waiting))
            waiting = []
            continue
        function, side = _function(item, alone="behind" if steps else "front")
        if side == "behind" and not steps:
            raise ValueError(f"exec_seq puts {function!r} behind a layer, but there is none before it")
        if side == "behind" and waiting:
            raise ValueError(
                f"exec_seq puts {function!r} behind layer {steps[-1].name!r}, but a function in front of the"
                " next layer comes before it; swap the two"
            )
        (waiting if side == "front" else steps[-1].behind).append(function)
    if waiting:
        raise ValueError(f"exec_seq puts {waiting[0]!r} in front of a layer, but there is none after it")
    return steps


def _defined(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a model; containers that only hold layers are opened."""
    for name, child in module.named_children():
        if type(child) in (nn.Sequential, nn.ModuleList):
            yield from _defined(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _module(modules: dict[str, nn.Module], name: str, model: nn.Module) -> nn.Module:
    if not name or name not in modules:
        known = ", ".join(child for child, _ in _defined(model))
        raise ValueError(
            f"exec_seq names the module {name!r}, which {type(model).__name__} does not have; it has {known}"
        )
    return modules[name]


def _function(item: Any, alone: str) -> tuple[Callable[..., Any], str]:
    function, side = item if isinstance(item, tuple) and len(item) == 2 else (item, alone)
    if not callable(function) or side not in _SIDES:
        raise ValueError(
            "exec_seq holds names of modules, functions, (function, 'front' or 'behind') and 'SPLIT_NODE',"
            f" got {item!r}"
        )
    return function, side
