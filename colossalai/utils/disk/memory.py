"""Host memory that a disk can write to and read from without a copy.

Direct I/O moves whole blocks between a disk and memory, and both must start at a multiple of the block's size.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes: the largest logical block of today's disks, and a page of memory


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks, and at least one."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


def aligned_empty(numel: int, dtype: torch.dtype = torch.uint8, *, pin_memory: bool = False) -> Tensor:
    """A row of ``numel`` elements at an address that direct I/O takes.

    With ``pin_memory`` it is page-locked, so that CUDA copies from and to it asynchronously.  Otherwise its memory goes back
    to the system as soon as the tensor dies, which malloc does not promise.
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
    """The memory at ``address``; somebody else must keep it alive."""
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
