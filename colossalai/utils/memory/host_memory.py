"""Large buffers in the memory of the host, for data that moves to and from a device.

torch's pinned memory is slow to get (about 2 GB/s on the machine we measured) and rounds sizes up to powers
of two.  Here memory comes from the operating system in huge pages, is touched by several threads at once, and
is then made known to CUDA: about 10 GB/s, and as fast to copy from.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from colossalai._numeric import round_up

HUGE = 1 << 21  # bytes of a huge page


def host_empty(size: int | Sequence[int], dtype: torch.dtype, *, pinned: bool | None = None) -> Tensor:
    """A tensor of zeros in host memory, on pages of its own.

    Args:
        pinned: whether the device may copy from and to it by itself, in the background; by default where
            there is CUDA.
    """
    shape = (size,) if isinstance(size, int) else tuple(size)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    needed = count * dtype.itemsize
    block = mmap.mmap(-1, round_up(needed, HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(block, dtype=torch.uint8)
    raw.zero_()  # pages come into being here, on all threads of torch
    if torch.cuda.is_available() if pinned is None else pinned:
        _register(raw, block)
    return raw[:needed].view(dtype).view(shape)


def _register(raw: Tensor, block: mmap.mmap) -> None:
    """Pin the memory of ``raw`` until its storage is freed."""
    runtime = torch.cuda.cudart()
    address = raw.data_ptr()
    code = runtime.cudaHostRegister(address, raw.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(
            f"CUDA cannot pin {raw.numel() / 2**30:.1f} GiB of host memory (error {int(code)}): the limit of"
            " locked memory (ulimit -l), or the memory itself, is too small"
        )
    weakref.finalize(raw.untyped_storage(), _release, address, block)


def _release(address: int, block: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
    del block  # the pages were kept until here, so that CUDA never knows memory that is gone
