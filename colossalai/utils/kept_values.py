"""Tensors whose values are put back after code has run that writes to some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.utils.written_memory import Piece, pieces_of, pieces_written


class KeptValues(TorchDispatchMode):
    """The values of ``tensors``: inside the block each is copied right before the first operation that writes
    to it, whether torch counts that write (``p.mul_``) or not (``p.data.mul_``).

    Every operation is watched, which takes time.  Those in ``buffers``, too, are copied at once: norms do not
    tell torch that they write to their statistics.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._kept: list[tuple[Tensor, Tensor]] = []
        """The tensors, and others that have their memory, also if they are moved to another."""
        self._copies: dict[int, Tensor] = {}
        self._places: dict[int, list[tuple[Piece, Tensor]]] = {}
        at_once = {id(buffer) for buffer in buffers}
        for tensor in tensors:
            pieces = pieces_of(tensor)
            if not pieces or tensor.is_inference():
                continue  # it has no values, or nothing writes to it
            alias = _plain(tensor)
            self._kept.append((tensor, alias))
            if id(tensor) in at_once:
                self._copies[id(alias)] = alias.clone()
            for piece in pieces:
                self._places.setdefault(piece.storage, []).append((piece, alias))

    @property
    def copies(self) -> list[Tensor]:
        """The copies that were made so far."""
        return list(self._copies.values())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether a compiled function inside may run; what it writes is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in pieces_written(func, args, kwargs):
            for piece, alias in self._places.get(written.storage, ()):
                if piece.overlaps(written) and id(alias) not in self._copies:
                    self._copies[id(alias)] = alias.clone()
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        """Let the tensors have the memory and the values that they had when this was made."""
        for tensor, alias in self._kept:
            copy = self._copies.get(id(alias))
            if copy is not None:
                alias.copy_(copy)
            if pieces_of(tensor) != pieces_of(alias):  # such as by ``p.data = other``
                with torch._C.DisableTorchFunctionSubclass():
                    tensor.data = alias


def _plain(tensor: Tensor) -> Tensor:
    """The same memory, without a gradient or the rules of a class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data
