"""A nest of tensors as it travels between stages: a description, and the bytes of its tensors.

A nest is a tensor, or tuples, lists and dicts of them in any depth.  A gradient has the nest of what it belongs to, with
None where there is no gradient.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

from colossalai.interface.batch import describe as describe_value


@dataclass(frozen=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Leaf:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class Description:
    """All about a nest but the values; equal descriptions need not be sent twice."""

    spec: TreeSpec
    leaves: tuple[Leaf | None, ...]

    @classmethod
    def of(cls, nest: Any) -> tuple[Description, list[Tensor]]:
        leaves, spec = tree_flatten(nest)
        described = tuple(None if leaf is None else Leaf.of(leaf) for leaf in leaves)
        return cls(spec, described), [leaf for leaf in leaves if leaf is not None]

    @classmethod
    def of_tensor(cls, shape: tuple[int, ...], dtype: torch.dtype, *, requires_grad: bool) -> Description:
        """The description of one tensor that everybody knows beforehand."""
        _, spec = tree_flatten(0)
        return cls(spec, (Leaf(tuple(shape), dtype, requires_grad),))

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The nest of ``tensors``, which are new leaves of the autograd graph."""
        left = iter(tensors)
        leaves = [
            None if leaf is None else next(left).requires_grad_(leaf.requires_grad) for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)

    def to_bytes(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> Description:
        description = pickle.loads(data)
        assert isinstance(description, Description)
        return description


def check_nest(nest: Any, who: str) -> None:
    """Refuse an output that cannot be sent to the next stage."""
    found, _ = tree_flatten_with_path(nest)
    if not found:
        raise TypeError(f"{who} returned {describe_value(nest)} without a tensor; the next stage needs one")
    for path, leaf in found:
        if not isinstance(leaf, Tensor):
            where = f" at {''.join(map(str, path))}" if path else ""
            raise TypeError(
                f"{who} returned {describe_value(leaf)}{where}; all stages but the last return a tensor, or a tuple,"
                " list or dict of tensors, for the next stage"
            )


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: backends carry bytes, whatever they think of the dtype."""
    return tensor.view(-1).view(torch.uint8)
