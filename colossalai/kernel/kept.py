"""What tensors were before an update that may have to be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from colossalai._numeric import round_up
from colossalai.kernel.lists import covers_its_memory
from colossalai.kernel.native.copy import copy_past_cache

ALIGNED = 64  # bytes: where each copy begins


def aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGNED)


class Kept:
    """Copies of ``tensors`` in ``buffer``.

    A kernel reads what it changes anyway, and may write the copies in the same pass: it asks for their
    ``places``.  For one that does not, ``copy`` is called before it.
    """

    def __init__(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        self._places: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensors, by their addresses
        self._copied: set[int] = set()
        start = 0
        for tensor in (tensor.detach() for tensor in tensors):
            room = buffer[start : start + tensor.nbytes].view(tensor.dtype)
            start += aligned(tensor.nbytes)
            is_dense = covers_its_memory(tensor)
            place = room.as_strided(tensor.shape, tensor.stride()) if is_dense else room.view(tensor.shape)
            self._places[tensor.data_ptr()] = tensor, place

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Where the copies of ``tensors``, with the same strides if these are dense, are to be: the caller
        makes them now.

        None for a tensor that is not known: the update itself has made it.
        """
        known = [address for tensor in tensors if (address := tensor.data_ptr()) in self._places]
        self._copied.update(known)
        return [self._places.get(tensor.data_ptr(), (None, None))[1] for tensor in tensors]

    def copy(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Copy ``tensors``, or all."""
        tensors = [tensor for tensor, _ in self._places.values()] if tensors is None else tensors
        pairs = [
            (t, place) for t, place in zip(tensors, self.places(tensors), strict=True) if place is not None
        ]
        copy_past_cache([place for _, place in pairs], [tensor for tensor, _ in pairs])

    def restore(self) -> None:
        """Let everything that was copied be what it was."""
        pairs = [self._places[address] for address in self._copied]
        copy_past_cache([tensor for tensor, _ in pairs], [place for _, place in pairs])
