"""Named tensors in a scratch file, moved by a few threads while the caller goes on.

A tensor is cut into requests of equal size, and several of them are under way at once: a fast disk is only fast with a queue.
System calls release Python's lock, so threads are enough.  A tensor that begins at a multiple of ``ALIGNMENT``
(``aligned_empty``) goes to the disk from where it lies; others are copied request by request.

Nothing is lost on the way: a tensor is kept alive until its last request is done, and a failure is raised by ``wait``, when the
caller still has it.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field

from torch import Tensor

from colossalai.utils.disk.memory import ALIGNMENT, padded
from colossalai.utils.disk.regions import Regions
from colossalai.utils.disk.requests import Mover, Pending
from colossalai.utils.disk.scratch import ScratchFile

THREADS = 8
REQUEST = 2 << 20  # bytes; benchmarks/disk.py compares


@dataclass
class Entry:
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
    """Tensors on a disk by name, in a file without a name in ``directory`` (None: the one for temporary files).

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
                f"DiskStore needs request_bytes that are a positive multiple of {ALIGNMENT}; got {request_bytes}"
            )
        self.capacity = capacity
        self.used = 0  # bytes of the disk
        self._file = ScratchFile(directory)
        self._mover = Mover(self._file, threads, request_bytes)
        self._entries: dict[str, Entry] = {}
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

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def reserve(self, *sizes: int) -> None:
        """Take room on the disk for tensors of so many bytes each, so that writing them will not find it full."""
        needed = sum(map(padded, sizes))
        with self._lock:
            self._check_capacity(needed)
            if grow := self._regions.missing(needed):
                self._file.grow(grow)
                self._regions.grow(grow)

    def write(self, name: str, tensor: Tensor) -> Pending:
        """Begin to write ``tensor``, which must not change before ``wait`` has returned."""
        self._check("write", name, tensor)
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.nbytes != tensor.nbytes:
                self.free(name)
                entry = None
            if entry is None:
                entry = self._entries[name] = self._new_entry(tensor.nbytes)
        entry.settle()
        entry.writing = self._mover.submit("write", tensor, entry.offset)
        return entry.writing

    def read(self, name: str, into: Tensor) -> Pending:
        """Begin to read into a tensor of the size of the one that was written; it is filled when ``wait`` has returned."""
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
        """Forget a tensor; its room is used for others."""
        with self._lock:
            entry = self._entries.pop(name)
            entry.settle()
            self._regions.give(entry.offset, padded(entry.nbytes))
            self.used -= padded(entry.nbytes)

    def close(self) -> None:
        """Finish what is under way and give the disk back."""
        if self._finalizer.detach() is not None:
            self._mover.close()

    def _new_entry(self, nbytes: int) -> Entry:
        self.reserve(nbytes)
        self.used += padded(nbytes)
        return Entry(self._regions.take(padded(nbytes)), nbytes)

    def _check(self, what: str, name: str, tensor: Tensor) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(f"cannot {what} {name!r}: this DiskStore is closed")
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"DiskStore needs contiguous tensors on cpu to {what}; {name!r} is on {tensor.device} with strides"
                f" {tensor.stride()} for shape {tuple(tensor.shape)}"
            )

    def _check_capacity(self, nbytes: int) -> None:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            raise RuntimeError(
                f"the disk tier in {self.directory} may hold {self.capacity} bytes: {self.used} are used and {nbytes} more"
                " are needed. Raise its capacity, or offload less"
            )
