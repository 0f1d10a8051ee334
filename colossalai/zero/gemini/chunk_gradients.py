"""Where the gradients of chunks wait for their update: in buffers on the host, or, where those are not enough, on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossalai.utils.disk import Buffers
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.disk_tier import TierMemory
from colossalai.zero.gemini.tiers import PendingCopy, Tier


@dataclass
class ChunkGradients:
    """The gradients of one chunk."""

    buffer: Tensor | None = None
    """Of the whole chunk, on the compute tier, filled by the backward pass."""
    arrived: set[ParamSlot] = field(default_factory=set)
    """Whose gradients are in the buffer."""
    sent: bool = False
    """Whether the buffer of this backward pass has been averaged already."""
    local: Tensor | None = None
    """Sum of whole buffers that have not been averaged (``no_sync``, or no room on the compute tier)."""
    local_tier: Tier | None = None
    shard: Tensor | None = None
    """At the chunk's home: the averaged sum of all passes since the last step."""
    move: PendingCopy = field(default_factory=PendingCopy)
    """The copy that fills ``shard``."""
    extra: list[tuple[Tensor, PendingCopy]] = field(default_factory=list)
    """More shards to be added to it, still arriving."""
    direct: dict[ParamSlot, Tensor] = field(default_factory=dict)
    """Gradients of a chunk that never leaves the compute tier, as the backward pass made them."""
    used: set[ParamSlot] = field(default_factory=set)
    """Which parameters have had a gradient since the last step."""
    untold: set[ParamSlot] = field(default_factory=set)
    """Which have had one that other ranks do not know of; an update in the backward pass may have taken it already."""
    norms: dict[ParamSlot, Tensor] | None = None
    """Of the sum, taken on the compute tier before it left; None where they are not known."""
    rows: list[str] = field(default_factory=list)
    """Summands that wait on the disk."""
    parts: int = 0
    """How many summands have been sent to the host since the last step."""

    @property
    def is_begun(self) -> bool:
        """Whether anything of the sum is at home."""
        return self.shard is not None or bool(self.rows)


@dataclass
class PendingGradients:
    """The gradients of a chunk that an update has taken over: the sum, and what is still to be added to it."""

    shard: Tensor | None
    arriving: list[PendingCopy]
    extra: list[Tensor]
    used: frozenset[ParamSlot]
    rows: list[str]

    def is_here(self) -> bool:
        """Whether everything has arrived on the host."""
        return all(move.event is None or move.event.query() for move in self.arriving)


class HostGradientBuffers:
    """Gradient buffers on the host that are used again and again: page-locked memory takes long to get.

    Where their number is limited, or there is a disk, each is large enough for any chunk.  ``wait`` waits until an update gives one back,
    ``spill`` lets one go to the disk; both say whether they did.
    """

    def __init__(
        self, chunks: ChunkManager, most: int | None, wait: Callable[[], bool], spill: Callable[[], bool]
    ) -> None:
        self.chunks, self.most, self.wait, self.spill = chunks, most, wait, spill
        self.made = 0
        self._free: dict[int, list[Tensor]] = {}  # by their size in bytes
        self._whole: dict[int, Tensor] = {}  # by the address of what was given away

    @property
    def missing_bytes(self) -> int:
        """What may still be taken of the host, if the number of buffers is limited."""
        return 0 if self.most is None else max(self.most - self.made, 0) * self.largest

    @property
    def largest(self) -> int:
        return max((chunk.shard_nbytes for chunk in self.chunks.chunks if chunk.trained), default=0)

    def get(self, chunk: Chunk) -> Tensor:
        uniform = self.most is not None or self.chunks.shelf is not None
        nbytes = self.largest if uniform else chunk.shard_nbytes
        free = self._free.setdefault(nbytes, [])
        while not free:
            if self.most is not None and self.made >= self.most and self.wait():
                continue  # if no update will give one back, more than wished for are needed
            if nbytes > self.chunks.host_room() and (self.spill() or self.wait()):
                continue
            free.append(self.chunks.host.empty(nbytes, torch.uint8, f"gradients of {chunk.name}"))
            self.made += 1
        whole = free.pop()
        self._whole[whole.data_ptr()] = whole
        return whole[: chunk.shard_nbytes].view(chunk.dtype)

    def put(self, buffer: Tensor) -> None:
        whole = self._whole.pop(buffer.data_ptr())
        self._free[whole.nbytes].append(whole)


class SpilledGradients:
    """Gradients that wait on the disk, and the two buffers in which their sum is made."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self._buffers: Buffers | None = None
        self._out: dict[int, Tensor] = {}
        self._count = 0

    def reserve(self, nbytes: int) -> None:
        """Sums will have up to this many bytes."""
        self._buffers = Buffers(2, TierMemory(self.chunks.host, "gradients on their way from the disk"))
        self._buffers.fit(nbytes)
        self.chunks.passing.append(self._buffers)

    def write(self, chunk: Chunk, shard: Tensor) -> str:
        """Write ``shard``; returns the name of the row."""
        shelf = self.chunks.shelf
        assert shelf is not None
        self._count += 1
        name, what = f"gradients {chunk.index} {self._count}", f"the gradients of {chunk.name}"
        shelf.room(name, shard.nbytes, what)
        shelf.write(name, shard, what).finish()
        return name

    def sum(self, chunk: Chunk, rows: Sequence[str]) -> Tensor:
        """The sum of ``rows``, in a buffer that ``give`` takes back."""
        total = self._read(chunk, rows[0])
        for row in rows[1:]:
            more = self._read(chunk, row)
            total.add_(more)
            self.give(more)
        return total

    def _read(self, chunk: Chunk, row: str) -> Tensor:
        shelf = self.chunks.shelf
        assert shelf is not None
        assert self._buffers is not None
        buffer = self._buffers.get()
        assert buffer is not None
        self._out[buffer.data_ptr()] = buffer
        found = buffer[: chunk.shard_nbytes]
        if (pending := shelf.read(row, found)) is not None:
            pending.wait()
        return found.view(chunk.dtype)

    def give(self, shard: Tensor) -> bool:
        """Take a buffer back; False if it is none of these."""
        buffer = self._out.pop(shard.data_ptr(), None)
        if buffer is None or self._buffers is None:
            return False
        self._buffers.give(buffer)
        return True

    def free(self, rows: Sequence[str]) -> None:
        for row in rows:
            assert self.chunks.shelf is not None
            self.chunks.shelf.free(row)
