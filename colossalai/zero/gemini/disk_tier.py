"""The disk as third tier: rows of bytes, and the weights that are read ahead."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from colossalai.nn.optimizer.nvme_pipeline import BUFFERS, GRAIN, RUN, slot_size
from colossalai.utils.disk import Buffers, Pending, Shelf, aligned_empty, padded
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.tiers import OutOfCapacity, PendingCopy, Tier, check_capacity

UPDATES = 3  # buffers for weights that are updated: one is updated, one is read, one is written
STATES = 4  # at most, of a parameter
STATE_BYTES = 12  # the most that an update keeps of an element: two moments and a master


class DiskShelf(Shelf):
    """A shelf that is the disk tier: its store counts the rows, in whole blocks of the disk."""

    def __init__(self, directory: str | os.PathLike[str] | None, capacity: int | None = None) -> None:
        check_capacity("disk", capacity)
        super().__init__(directory, capacity)
        self.tier = Tier("disk", torch.device("cpu"), capacity, count=self.store.count)

    def room(self, name: str, nbytes: int, what: str) -> None:
        """Count a row before it is written; it replaces an earlier one of this name."""
        if not self.store.book(name, nbytes):
            raise self.tier.no_room(padded(nbytes), what)

    def finish(self) -> None:
        """Wait for all writes; raise, once, if some failed."""
        super().finish()
        self.raise_failures()

    def raise_failures(self) -> None:
        if failures := self.pop_failures():
            what, _, first = failures[0]
            others = len({failure.what for failure in failures}) - 1
            raise OSError(
                first.errno,
                f"{what} could not be written to the disk tier{f' (nor {others} others)' if others else ''}:"
                f" {first.strerror}. Nothing is lost: they are kept in memory, and the next update tries"
                " again. Save a checkpoint, and make room on the disk",
            ) from first


class TierMemory:
    """Allocates memory of a tier for buffers; ``pinned`` where the tier is, so that a GPU can copy from and
    to it.
    """

    def __init__(self, tier: Tier, what: str, pinned: bool = False) -> None:
        self.tier, self.what, self.pinned = tier, what, pinned

    def get(self, nbytes: int, must: bool) -> Tensor | None:
        try:
            if self.pinned and self.tier.pinned:
                return self.tier.empty(nbytes, torch.uint8, self.what)
            self.tier.reserve(nbytes, self.what)
        except OutOfCapacity:
            if must:
                raise
            return None
        return aligned_empty(nbytes)

    def give(self, nbytes: int) -> None:
        self.tier.release(nbytes)


class WeightReader:
    """Reads the weights of chunks that rest on the disk, ahead of their way to the compute tier."""

    def __init__(self, shelf: Shelf, buffers: Buffers) -> None:
        self.shelf, self.buffers = shelf, buffers
        self._staged: dict[int, tuple[Tensor, Pending | None]] = {}

    def begin(self, chunk: Chunk, force: bool = False) -> bool:
        """Begin to read ``chunk``; return False if no buffer is free."""
        if chunk.index in self._staged:
            return True
        buffer = self.buffers.get(wait=force, must=force)
        if buffer is None:
            return False
        self._staged[chunk.index] = buffer, self.shelf.read(weights_of(chunk), buffer[: chunk.shard_nbytes])
        return True

    def get(self, chunk: Chunk) -> Tensor:
        """Return the shard of ``chunk``, which is valid until ``used``."""
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

    def used(self, chunk: Chunk, move: PendingCopy) -> None:
        """Free the buffer of ``chunk`` when ``move``, which copies from it, is done."""
        buffer, _ = self._staged.pop(chunk.index)
        event, work = move.event, move.work

        def wait() -> None:
            if event is not None:
                event.synchronize()
            elif work is not None:
                work.wait()

        self.buffers.give(buffer, wait)

    def forget(self, index: int) -> None:
        """Drop what was read of this chunk: it is not wanted, or out of date."""
        if index in self._staged:
            buffer, pending = self._staged.pop(index)
            if pending is not None:
                pending.settle()
            self.buffers.give(buffer)


def largest_slot(chunk_bytes: int, all_bytes: int) -> int:
    """Return the bytes of the largest slot of a chunk whose states have ``chunk_bytes``, of ``all_bytes`` in
    all.
    """
    return min(chunk_bytes, max(slot_size(all_bytes), GRAIN * STATE_BYTES)) + STATES * RUN


def passing_bytes(chunks: Sequence[Chunk]) -> int:
    """Return the most bytes of the host that updates may need for transfers from and to the disk."""
    largest, total = max(c.shard_size for c in chunks), sum(c.shard_size for c in chunks)
    slots = BUFFERS * largest_slot(largest * STATE_BYTES, total * STATE_BYTES)
    return slots + UPDATES * max(c.shard_nbytes for c in chunks)


def weights_of(chunk: Chunk) -> str:
    return f"weights {chunk.index}"
