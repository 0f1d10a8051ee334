"""Copies of host tensors that will not be read soon: past the cache, on many threads; half the time of a
plain copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

import colossalai.kernel.native.build as build

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
