"""Finds the tensors in what modules take and return: trees of torch, dataclasses, attributes of objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

DEPTH = 4  # of objects in objects that are searched for tensors


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Return the tensors in tuples, lists, dicts and other trees of torch."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Return the tensors with a backward pass in ``values``, also in dataclasses and attributes."""
    return (tensor for tensor in _held(values, DEPTH) if tensor.requires_grad)


def map_held(function: Callable[[Tensor], Any], values: Any, depth: int = DEPTH) -> Any:
    """Return ``values`` with ``function(tensor)`` in the place of each tensor; objects that hold some are
    copied.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if next(_held(leaf, depth), None) is None:
            return leaf
        made = copy.copy(leaf)
        for name, value in _attributes(leaf).items():
            object.__setattr__(made, name, map_held(function, value, depth - 1))  # it may be frozen
        return made

    return tree_map(mapped, values)


def _held(values: Any, depth: int) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type):
            yield from _held(_attributes(leaf), depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):  # may have slots
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))
