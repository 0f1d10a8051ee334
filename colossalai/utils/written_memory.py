"""Which memory operations write to, also by views whose writes the versions of tensors do not count; and
copies of tensors that are made in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a storage, whose number is valid while it lives."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Piece) -> bool:
        """Whether both have a byte in common."""
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


def pieces_of(value: Any) -> list[Piece]:
    """The memory of all tensors in ``value``, also of those that a tensor wraps."""
    found = []
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            found += pieces_of([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif leaf.layout == torch.strided and leaf.numel():
            steps = zip(leaf.shape, leaf.stride(), strict=True)
            start = int(leaf.storage_offset())
            stop = start + 1 + int(sum((size - 1) * stride for size, stride in steps))
            storage = leaf.untyped_storage()._cdata
            found.append(Piece(storage, start * leaf.itemsize, stop * leaf.itemsize))
    return found


def memory_of(value: Any) -> set[int]:
    """The storages of all tensors in ``value``."""
    return {piece.storage for piece in pieces_of(value)}


def pieces_written(operation: Any, args: Any, kwargs: Any) -> list[Piece]:
    """The memory that ``operation`` writes to, if it runs with these arguments."""
    schema = getattr(operation, "_schema", None)  # control flow has none, and writes to nothing
    if schema is None or not schema.is_mutable:
        return []
    given = [
        args[place] if place < len(args) else (kwargs or {}).get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.is_write
    ]
    return pieces_of(given)


def memory_written(operation: Any, args: Any, kwargs: Any) -> set[int]:
    """The storages that ``operation`` writes to."""
    return {piece.storage for piece in pieces_written(operation, args, kwargs)}


def same_memory(tensor: Tensor) -> Tensor:
    """A tensor with the memory of this one, without its gradient and the rules of its class; it keeps that
    memory if the other moves to another.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data


class CopiedBeforeWrites(TorchDispatchMode):
    """Inside the block, each of ``tensors`` is copied right before the first operation that writes to it,
    whether torch counts that write (``p.mul_``) or not (``p.data.mul_``).

    ``aliases`` are tensors with their memory, and ``copies`` the copies, by their places in ``tensors``.
    Every operation is watched, which takes time on the host.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.aliases = [same_memory(tensor) for tensor in tensors]
        self.copies: dict[int, Tensor] = {}
        self._places: dict[int, list[tuple[Piece, int]]] = {}
        for place, alias in enumerate(self.aliases):
            for piece in pieces_of(alias):
                self._places.setdefault(piece.storage, []).append((piece, place))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether a compiled function inside may run; what it writes is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place in self.touched(pieces_written(func, args, kwargs)) - self.copies.keys():
            self.copies[place] = self.aliases[place].clone()
        return func(*args, **(kwargs or {}))

    def touched(self, pieces: Iterable[Piece]) -> set[int]:
        """The places of the tensors that share memory with ``pieces``."""
        return {
            place
            for used in pieces
            for piece, place in self._places.get(used.storage, ())
            if piece.overlaps(used)
        }
