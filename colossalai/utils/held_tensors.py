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
    return (tensor for tensor in held(values) if tensor.requires_grad)


def map_held(function: Callable[[Any], Any], values: Any, kind: type = Tensor, depth: int = DEPTH) -> Any:
    """Return ``values`` with ``function(held)`` in the place of each tensor, or of whatever is of this
    ``kind``; objects that hold some are copied.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        if next(held(leaf, kind, depth), None) is None:
            return leaf
        made = copy.copy(leaf)
        for name, value in _attributes(leaf).items():
            object.__setattr__(made, name, map_held(function, value, kind, depth - 1))  # it may be frozen
        return made

    return tree_map(mapped, values, is_leaf=lambda leaf: isinstance(leaf, kind))


def held(values: Any, kind: type = Tensor, depth: int = DEPTH) -> Iterator[Any]:
    """Yield the tensors, or whatever is of this ``kind``, also in dataclasses and attributes."""
    for leaf in tree_leaves(values, is_leaf=lambda leaf: isinstance(leaf, kind)):
        if isinstance(leaf, kind):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type):
            yield from held(_attributes(leaf), kind, depth - 1)


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):  # may have slots
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))
