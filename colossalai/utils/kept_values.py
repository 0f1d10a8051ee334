"""Tensors whose values are put back after code has run that writes to some of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from colossalai.utils.written_memory import CopiedBeforeWrites, pieces_of


class KeptValues(CopiedBeforeWrites):
    """The values of ``tensors``, which are copied inside the block when they are written to.

    Those in ``buffers``, too, are copied at once: norms do not tell torch that they write to their
    statistics.
    """

    def __init__(self, tensors: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> None:
        # others have no values, or nothing writes to them
        self._tensors = [t for t in tensors if pieces_of(t) and not t.is_inference()]
        super().__init__(self._tensors)
        at_once = {id(buffer) for buffer in buffers}
        for place, tensor in enumerate(self._tensors):
            if id(tensor) in at_once:
                self.copies[place] = self.aliases[place].clone()

    def restore(self) -> None:
        """Let the tensors have the memory and the values that they had when this was made."""
        for place, (tensor, alias) in enumerate(zip(self._tensors, self.aliases, strict=True)):
            if place in self.copies:
                alias.copy_(self.copies[place])
            if pieces_of(tensor) != pieces_of(alias):  # such as by ``p.data = other``
                with torch._C.DisableTorchFunctionSubclass():
                    tensor.data = alias
