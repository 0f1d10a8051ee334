"""One data file of a checkpoint: a safetensors file, written tensor by tensor and read in place.

``safetensors`` itself would want all tensors of a file in memory at once to write them.  The format is a few
lines: the length of a JSON header, the header, the bytes.  What lies in one run is read to where it is
wanted; for anything else the file is mapped into memory, so that just the rows that are copied are read from
the disk.  Every tensor has a CRC-32, which finds any damage of up to 32 bits in a row for sure, and runs on
several threads at once (1.7 GB/s each on the machine we measured; cryptographic hashes are six times slower
and not needed).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossalai.checkpoint_io.boxes import Shape
from colossalai.checkpoint_io.byte_io import (
    AHEAD,
    DTYPES,
    file_strips,
    name_of,
    read_into,
    start_writing,
    strips_of,
    write_all,
)

ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class TensorToWrite:
    """A tensor that is to be written under ``key``; ``read`` gives it, on any device."""

    key: str
    dtype: torch.dtype
    shape: Shape
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, blocks: Sequence[TensorToWrite], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write a file that must not exist yet, to the disk; returns the CRC of each tensor."""
    # without gaps and each at a multiple of its size, as the format asks
    blocks = sorted(blocks, key=lambda block: -block.dtype.itemsize)
    sums = {}
    with path.open("xb", buffering=0) as file:
        write_all(file, _header(blocks, metadata or {}))
        for block in blocks:
            sums[block.key] = _write_tensor(file, block)
        os.fsync(file.fileno())
    return sums


def _header(blocks: Sequence[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    place = 0
    for block in blocks:
        content[block.key] = {
            "dtype": name_of(block.dtype),
            "shape": list(block.shape),
            "data_offsets": [place, place + block.nbytes],
        }
        place += block.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: Any, block: TensorToWrite) -> int:
    tensor = block.read()
    if tuple(tensor.shape) != block.shape or tensor.dtype != block.dtype:
        raise RuntimeError(
            f"{block.key} changed while it was saved: it is {tensor.dtype} of shape {tuple(tensor.shape)}"
            " now, and was"
            f" {block.dtype} of shape {block.shape}"
        )
    crc, started = 0, file.tell()
    for strip in strips_of(tensor):
        crc = zlib.crc32(strip, crc)
        write_all(file, strip)
        if (end := file.tell()) - started >= AHEAD:
            start_writing(file.fileno(), started, end)
            started = end
    return crc


class StoredFile:
    """A safetensors file mapped into memory; what does not add up is an error that names file and tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            # private: torch wants memory that could be written to
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise FileNotFoundError(f"the checkpoint lacks its file {path}") from None
        except (ValueError, OSError) as error:
            raise RuntimeError(f"{path} cannot be read: {error}") from error
        self._start, self._header = self._read_header()

    def tensor(self, key: str, dtype: torch.dtype, shape: Shape) -> Tensor:
        """The tensor ``key``, in the memory of the file; it must not be written to."""
        start, nbytes = self._find(key, dtype, shape)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        count = math.prod(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)

    def check(self, key: str, dtype: torch.dtype, shape: Shape, crc: int) -> None:
        """Read the tensor ``key`` and compare its sum."""
        start, nbytes = self._find(key, dtype, shape)
        found = 0
        with self._named_errors(key):
            for strip in file_strips(self._file.fileno(), start, nbytes):
                found = zlib.crc32(strip, found)
        if found != crc:
            raise RuntimeError(
                f"{self.path} is damaged: the checksum of {key} is {found:08x}, and {crc:08x} was written"
            )

    def read(self, key: str, dtype: torch.dtype, shape: Shape, first: int, target: Tensor) -> None:
        """Fill ``target``, contiguous and of ``dtype``, with consecutive elements of the tensor ``key``."""
        start, _ = self._find(key, dtype, shape)
        with self._named_errors(key):
            read_into(self._file.fileno(), start + first * dtype.itemsize, target)

    @contextmanager
    def _named_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(f"{self.path} cannot be read where {key} is: {error}") from error

    def keys(self) -> list[str]:
        return list(self._header)

    def _find(self, key: str, dtype: torch.dtype, shape: Shape) -> tuple[int, int]:
        """Where ``key`` begins in the file, and its length."""
        if key not in self._header:
            raise RuntimeError(f"{self.path} does not hold {key}, which the manifest says is there")
        found = self._header[key]
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            start, end = (int(place) for place in found["data_offsets"])
            fits = DTYPES.get(found["dtype"]) == dtype and tuple(found["shape"]) == shape
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self.path} has a damaged header for {key}: {found!r}") from error
        if not fits:
            raise RuntimeError(
                f"{self.path} holds {key} as {found['dtype']} of shape {tuple(found['shape'])}; the manifest"
                " says"
                f" {name_of(dtype)} of shape {shape}"
            )
        if start < 0 or end - start != nbytes or self._start + end > len(self._map):
            raise RuntimeError(
                f"{self.path} is cut short or damaged: {key} is said to lie at {start} to {end} of"
                f" {len(self._map) - self._start}"
                f" bytes, and has {nbytes}"
            )
        return self._start + start, nbytes

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(self._map[:8], "little")
        try:
            if not 2 <= length <= len(self._map) - 8:
                raise ValueError(f"a header of {length} bytes in a file of {len(self._map)}")
            header = json.loads(self._map[8 : 8 + length])
            if not isinstance(header, dict):
                raise ValueError("the header is not an object")
        except (ValueError, RecursionError) as error:
            raise RuntimeError(
                f"{self.path} is not a safetensors file, or is damaged or cut short: {error}"
            ) from error
        return 8 + length, {key: value for key, value in header.items() if key != "__metadata__"}
