"""Host memory for what goes to a disk and comes from it: aligned for direct
I/O, in a few buffers that are used in turn.

Direct I/O moves whole blocks between a disk and memory, and both must start at
a multiple of the block's size.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from colossalai._numeric import round_up

ALIGNMENT = 4096  # bytes: the largest logical block of today's disks, and a page of memory


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks, and at least one."""
    return round_up(max(nbytes, 1), ALIGNMENT)


def aligned_empty(numel: int, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """A row of ``numel`` elements at an address that direct I/O takes.

    With ``pin_memory`` it is page-locked, so that CUDA copies from and to it asynchronously.  Otherwise its
    memory goes back to the system as soon as the tensor dies, which malloc does not promise.
    """
    room = padded(numel * dtype.itemsize)
    if pin_memory:
        raw = torch.empty(room + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        raw = raw[-raw.data_ptr() % ALIGNMENT :]
    else:
        pages = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = torch.frombuffer(pages, dtype=torch.uint8)
    return raw[: numel * dtype.itemsize].view(dtype)


def bytes_of(address: int, nbytes: int) -> memoryview:
    """Return the memory at ``address``, which the caller must keep alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Bounce:
    """A buffer for each thread, for the data of tensors that are not aligned."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._local = threading.local()

    def address(self) -> int:
        """The buffer of the thread that asks."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = aligned_empty(self.nbytes)
        return int(self._local.buffer.data_ptr())


class Memory(Protocol):
    """Where buffers come from."""

    def get(self, nbytes: int, must: bool) -> Tensor | None:
        """A row of bytes; None if there is no room, or, where it ``must``, an error."""

    def give(self, nbytes: int) -> None:
        """A row of so many bytes is dropped."""


class AnyMemory:
    """As much memory as there is."""

    def get(self, nbytes: int, must: bool) -> Tensor | None:
        return aligned_empty(nbytes)

    def give(self, nbytes: int) -> None:
        """Do nothing: the memory is freed with its tensor."""


class Buffers:
    """At most ``most`` buffers; used by one thread at a time.

    A buffer that is given back with ``wait`` is used again when that has returned.
    """

    def __init__(self, most: int, memory: Memory | None = None) -> None:
        self.most, self.memory = most, memory or AnyMemory()
        self.nbytes = self.made = 0
        self._free: list[Tensor] = []
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    @property
    def missing_bytes(self) -> int:
        """What may still be taken of the memory."""
        return (self.most - self.made) * self.nbytes

    def fit(self, nbytes: int) -> None:
        """Buffers have at least this size from now on."""
        if nbytes > self.nbytes:
            self.land_all()
            for _ in self._free:
                self._drop(self.nbytes)
            self._free.clear()
            self.nbytes = nbytes

    def get(self, *, wait: bool = True, must: bool = True) -> Tensor | None:
        """Return a free buffer.

        Args:
            wait: wait for a buffer that was given back and is still in use; otherwise return None then.
            must: raise if there is no memory for a buffer; otherwise return None then.
        """
        if not self._free and self.made < self.most:
            self._make(must and not self._busy)
        if not self._free and self._busy and wait:
            self._land()
        if not self._free:
            assert not must, "all buffers are in use"
            return None
        return self._free.pop()

    def give(self, buffer: Tensor, wait: Callable[[], None] | None = None) -> None:
        if buffer.nbytes < self.nbytes:
            if wait is not None:
                wait()
            self._drop(buffer.nbytes)
        elif wait is None:
            self._free.append(buffer)
        else:
            self._busy.append((buffer, wait))

    def land_all(self) -> None:
        """Wait for all that were given back."""
        while self._busy:
            self._land()

    def _land(self) -> None:
        buffer, wait = self._busy.popleft()
        wait()
        self._free.append(buffer)

    def _make(self, must: bool) -> None:
        made = self.memory.get(self.nbytes, must)
        if made is not None:
            self.made += 1
            self._free.append(made)

    def _drop(self, nbytes: int) -> None:
        self.memory.give(nbytes)
        self.made -= 1
