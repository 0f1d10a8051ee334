"""A nest of tensors as it travels between stages: a description, and the bytes of its tensors.

A nest is a tensor, or tuples, lists and dicts of them in any depth; a None among them stays one (no mask, no
cache), and so does any other value, which travels in the description.  A gradient has the nest of what it
belongs to, with None where there is no gradient.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

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
    """All about a nest but the values; equal descriptions need not be sent twice.

    ``nest`` is the nest with a ``Leaf`` in the place of every tensor.
    """

    nest: Any

    @classmethod
    def of(cls, nest: Any) -> tuple[Description, list[Tensor]]:
        tensors, spec = tree_flatten(nest)
        leaves = [Leaf.of(tensor) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
        return cls(tree_unflatten(leaves, spec)), [t for t in tensors if isinstance(t, Tensor)]

    @property
    def leaves(self) -> list[Leaf]:
        return [leaf for leaf in tree_flatten(self.nest)[0] if isinstance(leaf, Leaf)]

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """The nest of ``tensors``, which are new leaves of the autograd graph."""
        leaves, spec = tree_flatten(self.nest)
        left = iter(tensors)
        found = [
            next(left).requires_grad_(leaf.requires_grad) if isinstance(leaf, Leaf) else leaf
            for leaf in leaves
        ]
        return tree_unflatten(found, spec)

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
    for path, leaf in found:
        if not isinstance(leaf, Tensor) and (leaf is not None or not path):
            where = f" at {keystr(path)}" if path else ""
            raise TypeError(
                f"{who} returned {describe_value(leaf)}{where}; all stages but the last return a tensor, or a"
                " tuple, list or dict of tensors, for the next stage"
            )
    if not any(isinstance(leaf, Tensor) for _, leaf in found):
        raise TypeError(f"{who} returned {describe_value(nest)} without a tensor; the next stage needs one")


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: backends carry bytes, whatever they think of the dtype."""
    return tensor.view(-1).view(torch.uint8)
