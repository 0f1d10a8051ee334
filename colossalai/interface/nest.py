"""Batches are nests of tensors: tuples, lists and dicts in any depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def to_device(nest: Any, device: torch.device) -> Any:
    """The same nest with every tensor on ``device``; what is not a tensor stays as it is."""
    if isinstance(nest, Tensor) or (hasattr(nest, "to") and callable(nest.to)):
        # a copy from pinned memory goes on while the host continues; torch orders it before the first use
        return nest.to(device, non_blocking=True) if isinstance(nest, Tensor) else nest.to(device)
    if isinstance(nest, Mapping):
        return {key: to_device(value, device) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(to_device(value, device) for value in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(to_device(value, device) for value in nest)
    return nest


def tensors(nest: Any) -> Iterator[Tensor]:
    """All tensors of a nest, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors(value)
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from tensors(value)


def lengths(nest: Any) -> Counter[int]:
    """How many tensors of a nest have so many rows, for every length that occurs."""
    return Counter(len(tensor) for tensor in tensors(nest) if tensor.ndim)


def token_count(nest: Any) -> int:
    """The tokens of a batch of texts: the elements of its first tensor, if that is a matrix of integers;
    else 0.
    """
    first = next(tensors(nest), None)
    if first is None or first.ndim != 2 or first.is_floating_point() or first.is_complex():
        return 0
    return first.numel()


def batch_size(nest: Any) -> int:
    """The length that most tensors have, and of several such the first; 0 if there is none.

    A tensor of one row counts only among its like: beside longer ones it is for all samples, as a mask or
    positions are.
    """
    found = lengths(nest)
    longer = [length for length in found if length > 1]
    return max(longer or found, key=found.__getitem__, default=0)
