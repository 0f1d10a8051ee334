"""One Triton launch over many tensors.

The tensors are cut into chunks, and each program of the launch takes one chunk.  Tables in device memory tell
it which: the tensor of each chunk, the first chunk of each tensor, the size of each tensor, and the address
of each tensor of each list. The first three depend on the sizes only and are kept; the addresses (gradients
move) are sent every step, without waiting, from pinned memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1 << 15
BLOCK = 1 << 10


class ChunkTable(NamedTuple):
    """The cut of tensors of given sizes, as tables on the device."""

    owners: Tensor  # (chunks,) the tensor of each chunk
    firsts: Tensor  # (tensors + 1,) the first chunk of each tensor
    sizes: Tensor  # (tensors,)

    @property
    def programs(self) -> int:
        return self.owners.numel()


@lru_cache(maxsize=64)
def cut(sizes: tuple[int, ...], device: torch.device) -> ChunkTable:
    size = torch.tensor(sizes, dtype=torch.int64)
    counts = (size + CHUNK - 1) // CHUNK
    firsts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return ChunkTable(*(table.to(device) for table in (owners, firsts, size)))


class AddressTable(NamedTuple):
    """The addresses of several lists of tensors, and what the kernel is told about them."""

    addresses: Tensor  # (lists, tensors)
    chunks: ChunkTable
    is_aligned: bool


def table(*lists: list[Tensor]) -> AddressTable:
    device = lists[0][0].device
    addresses = torch.tensor([[t.data_ptr() for t in one] for one in lists], dtype=torch.int64)
    aligned = bool((addresses % 16 == 0).all())
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    return AddressTable(addresses, cut(tuple(t.numel() for t in lists[0]), device), aligned)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def type_of(tensors: list[Tensor]) -> Any:
    """Triton's word for the dtype of a list."""
    return {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.int16: tl.int16,
    }[tensors[0].dtype]


# [Note: full blocks first] Loads and stores are wide only if the compiler knows that no element of a row of
# 16 bytes is left out.  So programs run over the full blocks of their chunk without a mask, and once more,
# with one, over what is left.


@triton.jit
def pointer(addresses, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address at ``index`` of the table, which the compiler may know to be a multiple of 16."""
    row = tl.load(addresses + index).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return row


@triton.jit
def load(row, at, size, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements ``at`` of a row in float32; 0 beyond its end."""
    if MASKED:
        return tl.load(row + at, mask=at < size, other=0.0).to(tl.float32)
    return tl.load(row + at).to(tl.float32)


@triton.jit
def store(row, at, value, size, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the elements ``at`` of a row, in its dtype."""
    value = value.to(row.dtype.element_ty)
    if MASKED:
        tl.store(row + at, value, mask=at < size)
    else:
        tl.store(row + at, value)


@triton.jit
def load_split(upper_row, tail_row, at, size, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 elements ``at`` of which two rows of int16 are the halves (see ``split``); 0 beyond the
    end.
    """
    if MASKED:
        upper = tl.load(upper_row + at, mask=at < size, other=0)
        tail = tl.load(tail_row + at, mask=at < size, other=0)
    else:
        upper = tl.load(upper_row + at)
        tail = tl.load(tail_row + at)
    return ((upper.to(tl.int32) << 16) + tail.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def store_split(upper_row, tail_row, at, value, size, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the two halves of float32 elements."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 32768) >> 16
    tail = (bits - (upper << 16)).to(tl.int16)
    if MASKED:
        tl.store(upper_row + at, upper.to(tl.int16), mask=at < size)
        tl.store(tail_row + at, tail, mask=at < size)
    else:
        tl.store(upper_row + at, upper.to(tl.int16))
        tl.store(tail_row + at, tail)
