"""Bytes between tensors and files, a strip at a time.

A strip is read, summed and written while it is in the cache.  What is on a GPU passes through a strip of
pinned memory that every
thread has for itself: so a save needs no host memory for whole tensors, and no pages that the system must
first make.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from colossalai.utils.memory.host_memory import host_empty

STRIP = 1 << 22  # bytes
AHEAD = 4 * STRIP  # what the disk is asked for before it is needed, and begins to write before all is there
THREADS = max(4, min(8, os.cpu_count() or 1))  # some of them wait for the disk

_rooms = threading.local()


def strips_of(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor, in order; each strip is good until the next is asked for."""
    flat = flat_bytes(tensor.detach().contiguous())
    for start in range(0, flat.numel(), STRIP):
        part = flat[start : start + STRIP]
        yield memory_of(part if part.device.type == "cpu" else _to_host(part))


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as the bytes it consists of."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    # as_strided: a dim of one element may have any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(flat: Tensor) -> memoryview:
    """The memory of ``flat``, bytes on the CPU."""
    return flat.numpy().data if flat.numel() else memoryview(b"")


def _to_host(part: Tensor) -> Tensor:
    room = _room(part.device)[: part.numel()]
    room.copy_(part, non_blocking=True)
    _wait_for(part)
    return room


def _wait_for(part: Tensor) -> None:
    if part.device.type == "cuda":
        torch.cuda.current_stream(part.device).synchronize()


def _room(device: torch.device) -> Tensor:
    """A strip of host memory of this thread, for what goes to or comes from ``device``."""
    if not hasattr(_rooms, "by_device"):
        _rooms.by_device = {}
    rooms: dict[torch.device, Tensor] = _rooms.by_device
    if device not in rooms:
        # a new thread is on the first GPU, and would begin to use it
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            rooms[device] = host_empty(STRIP, torch.uint8, pinned=device.type == "cuda")
    return rooms[device]


def wait_for_devices() -> None:
    """Wait for the work of this process on its GPU, so that other threads and streams may read and write."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def write_all(file: Any, data: Any) -> None:
    """Write all of ``data``, which a file without a buffer may take in parts."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def start_writing(descriptor: int, start: int, end: int) -> None:
    """Let the disk begin with these bytes of a file, that it does not have all to do at the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def file_strips(descriptor: int, start: int, nbytes: int) -> Iterator[memoryview]:
    """Bytes of a file, in order; each strip is good until the next is asked for."""
    room = _room(torch.device("cpu"))
    for place, size in _places(descriptor, start, nbytes):
        yield memory_of(_read(descriptor, place, room[:size]))


def read_into(descriptor: int, start: int, target: Tensor) -> None:
    """Fill a contiguous tensor, on any device, with the bytes of a file from ``start`` on."""
    flat = flat_bytes(target)
    direct = flat.device.type == "cpu"
    for place, size in _places(descriptor, start, flat.numel()):
        part = flat[place - start :][:size]
        if direct:
            _read(descriptor, place, part)
        else:
            part.copy_(_read(descriptor, place, _room(flat.device)[:size]), non_blocking=True)
            _wait_for(part)


def _places(descriptor: int, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The strips of a part of a file, with those that follow on their way from the disk."""
    for place in range(start, start + nbytes, STRIP):
        if hasattr(os, "posix_fadvise"):
            ahead = min(AHEAD, start + nbytes - place)
            os.posix_fadvise(descriptor, place, ahead, os.POSIX_FADV_WILLNEED)
        yield place, min(STRIP, start + nbytes - place)


def _read(descriptor: int, place: int, room: Tensor) -> Tensor:
    view = memory_of(room)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], place + done)
        if count == 0:
            raise OSError(f"the file ends at byte {place + done}, and {len(view) - done} more were expected")
        done += count
    return room


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    if dtype not in _BY_DTYPE:
        raise TypeError(
            f"safetensors cannot hold tensors of {dtype}; it knows {', '.join(map(str, _BY_DTYPE))}"
        )
    return _BY_DTYPE[dtype]


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{name!r} is not a dtype of safetensors; they are {', '.join(DTYPES)}")
    return DTYPES[name]
