"""The disk as third tier: named rows of bytes, and the few buffers on the host through which they pass.

Reads and writes are asynchronous.  A row whose write failed is kept in memory, so that nothing is lost; whoever looks next hears
of it, once, and the next write tries again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossalai.utils.disk import ALIGNMENT, DiskStore, Pending, aligned_empty
from colossalai.utils.disk.memory import padded
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.tiers import Move, OutOfCapacity, Tier

BLOCKS = 16  # of the disk: smaller rows are not worth being aligned
BUFFERS = 3  # of updates: one is updated, one is read, one is written
UNIT = 16  # bytes: where states begin in a buffer
STATES = 4  # at most, of a parameter
STATE_BYTES = 12  # the most that an update keeps of an element: two moments and a master


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
                self.shelf._kept.pop(self.name, None)
            else:
                self.shelf._kept[self.name] = self.data.view(torch.uint8).clone()
                self.shelf._failures.append((self.what, self.error))
            self._finished = True


class Shelf:
    """Rows of bytes by name, in a file without a name in ``directory``; ``tier`` counts them, in whole blocks of the disk."""

    def __init__(self, directory: str | os.PathLike[str] | None, capacity: int | None = None) -> None:
        self.store = DiskStore(directory)
        self.tier = Tier("disk", torch.device("cpu"), capacity)
        self._kept: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._writing: dict[str, Writing] = {}
        self._failures: list[tuple[str, OSError]] = []

    def room(self, name: str, nbytes: int, what: str) -> None:
        """Count a row before it is written, in the place of an earlier one of this name."""
        old, new = self._sizes.get(name, 0), padded(nbytes)
        if new > old:
            self.tier.take(new - old, what)
        else:
            self.tier.give(old - new)
        self._sizes[name] = new

    def write(self, name: str, data: Tensor, what: str) -> Writing:
        """Begin to write ``data``; ``room`` has been asked for."""
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
        if name in self._kept:
            into.view(torch.uint8).copy_(self._kept[name])
            return None
        return self.store.read(name, into)

    def free(self, name: str) -> None:
        """Forget a row."""
        if name in self._writing:
            self._writing.pop(name).finish()
        self._kept.pop(name, None)
        if name in self.store:
            self.store.free(name)
        self.tier.give(self._sizes.pop(name, 0))

    def finish(self) -> None:
        """Wait for all writes; raise, once, if some failed."""
        for writing in list(self._writing.values()):
            writing.finish()
        self.raise_failures()

    def raise_failures(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            what, first = failures[0]
            raise OSError(
                first.errno,
                f"{what} could not be written to the disk tier{_others(failures)}: {first.strerror}. Nothing is lost: they are kept in"
                " memory, and the next update tries again. Save a checkpoint, and make room on the disk",
            ) from first


def _others(failures: list[tuple[str, OSError]]) -> str:
    return f" (nor {len(failures) - 1} others)" if len(failures) > 1 else ""


class Buffers:
    """A few buffers of one size on the host that go round; used by one thread.

    A buffer that is given back with ``wait`` is used again when that has returned.
    """

    def __init__(self, host: Tier, most: int, what: str, pinned: bool = False) -> None:
        self.host, self.most, self.what, self.pinned = host, most, what, pinned
        self.nbytes = self.made = 0
        self._free: list[Tensor] = []
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    @property
    def missing_bytes(self) -> int:
        """What may still be taken of the host."""
        return (self.most - self.made) * self.nbytes

    def fit(self, nbytes: int) -> None:
        """Buffers have at least this size from now on."""
        if nbytes > self.nbytes:
            while self._busy:
                self._land()
            self.host.give(self.nbytes * len(self._free))
            self.made -= len(self._free)
            self._free.clear()
            self.nbytes = nbytes

    def get(self, nbytes: int, force: bool = True) -> Tensor | None:
        """A buffer; without ``force`` None if that means to wait for another to come back."""
        self.fit(nbytes)
        if not self._free and self.made < self.most:
            try:
                self._make()
            except OutOfCapacity:
                if not self._busy:
                    if force:
                        raise
                    return None
        if not self._free and self._busy and force:
            self._land()
        if not self._free:
            assert not force, f"all buffers for {self.what} are in use"
            return None
        return self._free.pop()

    def give(self, buffer: Tensor, wait: Callable[[], None] | None = None) -> None:
        if buffer.nbytes < self.nbytes:
            if wait is not None:
                wait()
            self.host.give(buffer.nbytes)
            self.made -= 1
        elif wait is None:
            self._free.append(buffer)
        else:
            self._busy.append((buffer, wait))

    def _land(self) -> None:
        buffer, wait = self._busy.popleft()
        wait()
        self._free.append(buffer)

    def _make(self) -> None:
        self.host.take(self.nbytes, self.what)
        self.made += 1
        pinned = self.host.pinned if self.pinned else None
        self._free.append(
            aligned_empty(self.nbytes) if pinned is None else pinned.empty(self.nbytes, torch.uint8)
        )


class Reader:
    """Weights of chunks that rest on the disk, read ahead of their way to the compute tier."""

    def __init__(self, shelf: Shelf, buffers: Buffers) -> None:
        self.shelf, self.buffers = shelf, buffers
        self._staged: dict[int, tuple[Tensor, Pending | None]] = {}

    def begin(self, chunk: Chunk, force: bool = False) -> bool:
        """Begin to read ``chunk``; False if no buffer is free."""
        if chunk.index in self._staged:
            return True
        buffer = self.buffers.get(chunk.shard_nbytes, force)
        if buffer is None:
            return False
        self._staged[chunk.index] = buffer, self.shelf.read(weights_of(chunk), buffer[: chunk.shard_nbytes])
        return True

    def get(self, chunk: Chunk) -> Tensor:
        """The shard of ``chunk``, until ``used``."""
        if chunk.index not in self._staged and len(self._staged) >= self.buffers.most:
            self.forget(next(reversed(self._staged)))
        self.begin(chunk, force=True)
        buffer, pending = self._staged[chunk.index]
        try:
            if pending is not None:
                pending.wait()
        except OSError as error:
            raise OSError(
                error.errno, f"the weights of {chunk.name} cannot be read: {error.strerror}"
            ) from error
        return buffer[: chunk.shard_nbytes].view(chunk.dtype)

    def used(self, chunk: Chunk, move: Move) -> None:
        """The shard is being copied by ``move``."""
        buffer, _ = self._staged.pop(chunk.index)
        event, work = move.event, move.work

        def wait() -> None:
            if event is not None:
                event.synchronize()
            elif work is not None:
                work.wait()

        self.buffers.give(buffer, wait)

    def forget(self, index: int) -> None:
        """What was read of this chunk is not wanted, or out of date."""
        if index in self._staged:
            buffer, pending = self._staged.pop(index)
            if pending is not None:
                pending.settle()
            self.buffers.give(buffer)


def after_weights(chunk: Chunk) -> int:
    """Where states begin in a buffer that holds the weights of ``chunk`` too: at a block, unless all of it is small."""
    nbytes = chunk.shard_nbytes
    return padded(nbytes) if nbytes >= BLOCKS * ALIGNMENT else -(-nbytes // UNIT) * UNIT


def passing_bytes(chunk: Chunk) -> int:
    """The most that an update of ``chunk`` may need of a buffer."""
    return after_weights(chunk) + chunk.shard_size * STATE_BYTES + len(chunk.slots) * STATES * UNIT


def weights_of(chunk: Chunk) -> str:
    return f"weights {chunk.index}"


def states_of(chunk: Chunk) -> str:
    return f"states {chunk.index}"
