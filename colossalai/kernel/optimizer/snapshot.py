"""Snapshots of tensors before an update that may be rolled back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

import colossalai.kernel.native.build as build
from colossalai._numeric import round_up
from colossalai.kernel.optimizer.lists import covers_its_memory

# Copies of host tensors that will not be read soon: past the cache, on many threads; half the time of a
# plain copy.

BLOCK = 1 << 21  # bytes
SMALL = 1 << 16  # bytes that are not worth a call


class _Block(ctypes.Structure):
    _fields_ = [("to", ctypes.c_void_p), ("from_", ctypes.c_void_p), ("n", ctypes.c_int64)]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return build.load("copy")
    except (RuntimeError, OSError):  # no compiler, or no place to write to: PyTorch does the same
        return None


@torch.no_grad()
def copy_past_cache(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each of ``sources`` to its target; pairs have one dtype and shape."""
    library = _library()
    blocks: list[_Block] = []
    for target, source in zip(targets, sources, strict=True):
        if library is not None and _is_plain(target, source):
            blocks += _blocks(target, source)
        else:
            target.copy_(source)
    if library is not None:
        library.copy_on_threads(
            (_Block * len(blocks))(*blocks),
            ctypes.c_int64(len(blocks)),
            ctypes.c_int64(torch.get_num_threads()),
        )


def _is_plain(target: Tensor, source: Tensor) -> bool:
    assert target.shape == source.shape
    assert target.dtype == source.dtype
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in (target, source))
    return plain and source.nbytes >= SMALL


def _blocks(target: Tensor, source: Tensor) -> Iterator[_Block]:
    for start in range(0, source.nbytes, BLOCK):
        yield _Block(target.data_ptr() + start, source.data_ptr() + start, min(BLOCK, source.nbytes - start))


ALIGNED = 64  # bytes: where each copy begins


def aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGNED)


class TensorSnapshot:
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
