"""Tensors on a disk by name, moved by a few threads while the caller goes on.

A tensor is cut into requests of equal size, and several of them are under way at once: a fast disk is only
fast with a queue.  System calls release Python's lock, so threads are enough.  A tensor that begins at a
multiple of ``ALIGNMENT`` (``aligned_empty``) goes to the disk from where it lies; others are copied request
by request.

Nothing is lost on the way.  ``DiskStore`` keeps a tensor alive until its last request is done, and raises a
failure in ``wait``, when the caller still has the tensor.  ``Shelf`` keeps what could not be written in
memory, reports it once, and tries again with the next write of that name.
"""

from __future__ import annotations

import bisect
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.utils.disk.buffers import ALIGNMENT, padded
from colossalai.utils.disk.scratch import Mover, Pending, ScratchFile
from colossalai.utils.memory.byte_count import ByteCount

THREADS = 8
REQUEST = 2 << 20  # bytes; benchmarks/disk.py compares


class Regions:
    """The free parts of a space that grows at its end, as (offset, size) in order, neighbours joined."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []

    def missing(self, nbytes: int) -> int:
        """By how much the space must grow until it has ``nbytes`` in one part."""
        if any(size >= nbytes for _, size in self._free):
            return 0
        last, length = self._free[-1] if self._free else (self.size, 0)
        return nbytes - length if last + length == self.size else nbytes

    def grow(self, nbytes: int) -> None:
        """The space has become larger."""
        self.size += nbytes
        self.give(self.size - nbytes, nbytes)

    def take(self, nbytes: int) -> int:
        """The offset of a part that was free; ``missing`` has said that there is one."""
        for index, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        raise AssertionError(f"no free part of {nbytes} bytes")

    def give(self, offset: int, nbytes: int) -> None:
        """This part is free again."""
        if not nbytes:
            return
        index = bisect.bisect(self._free, (offset, nbytes))
        start, stop = offset, offset + nbytes
        if index < len(self._free) and self._free[index][0] == stop:
            stop += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop - start))


@dataclass
class TensorOnDisk:
    """A tensor on the disk, and what is under way with it."""

    offset: int
    nbytes: int
    writing: Pending | None = None
    reading: list[Pending] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until nothing is under way; who began it learns of a failure from its own ``wait``."""
        for pending in [*self.reading, *([self.writing] if self.writing else [])]:
            pending.settle()
        self.reading.clear()


class DiskStore:
    """Tensors on a disk by name, in a file without a name in ``directory``
    (None: the one for temporary files).

    ``capacity`` limits the bytes on the disk.  Any thread may call, but one name is used by one at a time.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        capacity: int | None = None,
        threads: int = THREADS,
        request_bytes: int = REQUEST,
    ) -> None:
        if request_bytes <= 0 or request_bytes % ALIGNMENT:
            raise ValueError(
                f"DiskStore needs request_bytes that are a positive multiple of {ALIGNMENT}; got"
                f" {request_bytes}"
            )
        self.count = ByteCount(capacity)
        self._file = ScratchFile(directory)
        self._mover = Mover(self._file, threads, request_bytes)
        self._entries: dict[str, TensorOnDisk] = {}
        self._booked: dict[str, int] = {}
        self._regions = Regions()
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, self._mover.abandon)

    @property
    def directory(self) -> str:
        return str(self._file.directory)

    @property
    def is_direct(self) -> bool:
        """Whether data pass by the page cache."""
        return self._file.is_direct

    @property
    def bytes_written(self) -> int:
        """So far, by all writes that are complete."""
        return self._mover.bytes["write"]

    @property
    def bytes_read(self) -> int:
        return self._mover.bytes["read"]

    @property
    def used(self) -> int:
        """The bytes of the disk that tensors take or have booked."""
        return self.count.used

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def reserve(self, *sizes: int) -> None:
        """Take room on the disk for tensors of so many bytes each, so that
        writing them will not find it full.
        """
        needed = sum(map(padded, sizes))
        with self._lock:
            if not self.count.fits(needed):
                raise self._no_room(needed)
            self._grow_to(needed)

    def _grow_to(self, nbytes: int) -> None:
        if grow := self._regions.missing(nbytes):
            self._file.grow(grow)
            self._regions.grow(grow)

    def book(self, name: str, nbytes: int) -> bool:
        """Count a tensor of ``nbytes`` that will be written; return False if the capacity is exceeded.

        It takes the place of an earlier tensor of this name.
        """
        with self._lock:
            before, needed = self._booked.get(name, 0), padded(nbytes)
            if not self.count.take(needed - before):
                return False
            self._booked[name] = needed
            return True

    def write(self, name: str, tensor: Tensor) -> Pending:
        """Begin to write ``tensor``, which must not change before ``wait`` has returned."""
        self._check("write", name, tensor)
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.nbytes != tensor.nbytes:
                self._give_room(name)
                entry = None
            if entry is None:
                entry = self._entries[name] = self._new_entry(name, tensor.nbytes)
        entry.settle()
        entry.writing = self._mover.submit("write", tensor, entry.offset)
        return entry.writing

    def read(self, name: str, into: Tensor) -> Pending:
        """Begin to read into a tensor of the size of the one that was written.

        It is filled when ``wait`` has returned.
        """
        self._check("read", name, into)
        entry = self._entries.get(name)
        if entry is None or entry.writing is None:
            raise KeyError(f"nothing was written as {name!r} to {self.directory}")
        if entry.nbytes != into.nbytes:
            raise ValueError(
                f"{name!r} has {entry.nbytes} bytes on the disk, the tensor to read it into {into.nbytes}"
            )
        entry.writing.wait()  # raises if it failed: what was not written cannot be read
        entry.reading = [pending for pending in entry.reading if not pending.done()]
        entry.reading.append(self._mover.submit("read", into, entry.offset))
        return entry.reading[-1]

    def free(self, name: str) -> None:
        """Forget a tensor, if it is written or booked; its room is used for others."""
        with self._lock:
            if name in self._entries:
                self._give_room(name)
            self.count.take(-self._booked.pop(name, 0))

    def _give_room(self, name: str) -> None:
        entry = self._entries.pop(name)
        entry.settle()
        self._regions.give(entry.offset, padded(entry.nbytes))

    def close(self) -> None:
        """Finish what is under way and give the disk back."""
        if self._finalizer.detach() is not None:
            self._mover.close()

    def _new_entry(self, name: str, nbytes: int) -> TensorOnDisk:
        before, needed = self._booked.get(name, 0), padded(nbytes)
        if not self.book(name, nbytes):
            raise self._no_room(needed - before)
        try:
            self._grow_to(needed)
        except OSError:
            if before != needed:  # the caller has not booked it
                self.free(name)
            raise
        return TensorOnDisk(self._regions.take(needed), nbytes)

    def _check(self, what: str, name: str, tensor: Tensor) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"cannot {what} {name!r}: this DiskStore is closed")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"DiskStore needs contiguous tensors on cpu to {what}; {name!r} is on {tensor.device} with"
                f" strides {tensor.stride()} for shape {tuple(tensor.shape)}"
            )

    def _no_room(self, nbytes: int) -> RuntimeError:
        return RuntimeError(
            f"the disk tier in {self.directory} may hold {self.count.capacity} bytes: {self.used} are used"
            f" and {nbytes} more are needed. Raise its capacity, or offload less"
        )


class FailedWrite(NamedTuple):
    """A row that could not be written."""

    what: str
    nbytes: int
    error: OSError


@dataclass
class Writing:
    """A row on its way to the disk; its memory must not change before ``finish`` has returned."""

    shelf: Shelf
    name: str
    what: str
    data: Tensor
    pending: Pending | None
    error: OSError | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _finished: bool = False

    def finish(self) -> None:
        """Wait until the row is on the disk, or kept."""
        with self._lock:
            if self._finished:
                return
            try:
                if self.pending is not None:
                    self.pending.wait()
            except OSError as error:
                self.error = error
            if self.error is None:
                self.shelf.kept.pop(self.name, None)
            else:
                self.shelf.kept[self.name] = self.data.view(torch.uint8).clone()
                self.shelf.failures.append(FailedWrite(self.what, self.data.nbytes, self.error))
            self._finished = True


class Shelf:
    """Rows in a file without a name in ``directory`` (None: the one for temporary files).

    ``capacity`` limits their bytes.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, capacity: int | None = None) -> None:
        self.store = DiskStore(directory, capacity=capacity)
        self.kept: dict[str, Tensor] = {}
        self.failures: list[FailedWrite] = []
        self._writing: dict[str, Writing] = {}

    def write(self, name: str, data: Tensor, what: str) -> Writing:
        """Begin to write ``data``; ``what`` it is, is said where that fails."""
        if (before := self._writing.get(name)) is not None:
            before.finish()
        pending, error = None, None
        try:
            pending = self.store.write(name, data)
        except OSError as failed:  # a full disk is known at once
            error = failed
        self._writing[name] = Writing(self, name, what, data, pending, error)
        return self._writing[name]

    def read(self, name: str, into: Tensor) -> Pending | None:
        """Begin to read; None if it is done already."""
        self._writing[name].finish()
        if name in self.kept:
            into.view(torch.uint8).copy_(self.kept[name])
            return None
        return self.store.read(name, into)

    def free(self, name: str) -> None:
        """Forget a row, if there is one."""
        if name in self._writing:
            self._writing.pop(name).finish()
        self.kept.pop(name, None)
        self.store.free(name)

    def finish(self) -> None:
        """Wait for all writes."""
        for writing in list(self._writing.values()):
            writing.finish()

    def pop_failures(self) -> list[FailedWrite]:
        """What could not be written since the last call."""
        failures, self.failures = self.failures, []
        return failures
