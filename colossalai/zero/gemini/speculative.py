"""Speculative updates: begun in the backward pass, before the step decides about clipping and the loss scale.

Most steps are not clipped and do not overflow.  So the host, which has nothing else to do in the backward
pass, updates chunks whose gradients have come as if this step were such a step, and keeps a snapshot of
weights and states.  When the norm of all gradients is known, the step accepts the updates; or it rolls them
back and does them again with the right factor, or not at all.  A rollback restores everything to the last
bit.

An update that has not begun when the step comes is an ordinary one from then on.  A script that reads the
weights or the gradients between the backward pass and the step must see them as if no update had begun: all
speculative updates are rolled back first.  The backward pass does so too with a chunk whose weights it needs
again.

[Note: what is not speculative]
A chunk without states, or with weights that were loaded: its first update makes states for them.  With a loss
scale, a chunk of float32 (weights of batch norm): torch's kernel leaves divided gradients behind, which could
not be divided again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossalai._numeric import HALF_DTYPES
from colossalai.kernel.optimizer.snapshot import TensorSnapshot, aligned
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.utils.memory import available_host_memory, colo_get_cpu_memory_capacity
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_gradients import PendingGradients
from colossalai.zero.gemini.host_updates import HostUpdates
from colossalai.zero.gemini.optimizer_states import StateKinds, is_large
from colossalai.zero.gemini.shadow_optimizer import Options
from colossalai.zero.gemini.tiers import OutOfCapacity, Tier


class SnapshotBuffers:
    """Buffers for snapshots, which are reused: ``most`` bytes in all, in the memory of ``tier``, while
    ``room()`` has as many.

    One thread calls ``get``, and so makes buffers; any thread may call ``put``.
    """

    def __init__(self, tier: Tier, most: int, room: Callable[[], int]) -> None:
        self.tier, self.most, self.room = tier, most, room
        self.made = 0  # bytes
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def get(self, nbytes: int) -> Tensor | None:
        """Return a buffer of at least ``nbytes``, or None if there is none left."""
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
            if self.made + nbytes > self.most:
                return None
        if nbytes > self.room():  # it takes a while to find out
            return None
        with self._lock:
            self.made += nbytes
        try:
            self.tier.reserve(nbytes, "snapshots of updates in the backward pass")
        except OutOfCapacity:  # an update took the room meanwhile
            with self._lock:
                self.made -= nbytes
            return None
        return torch.empty(nbytes, dtype=torch.uint8)  # only the CPU touches it: not page-locked

    def put(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Free the buffers that are not in use: their memory is needed elsewhere."""
        with self._lock:
            free, self._free = self._free, []
            self.made -= sum(buffer.nbytes for buffer in free)
        for buffer in free:
            self.tier.release(buffer.nbytes)


class ChunkSnapshot:
    """A snapshot, in ``buffer``, of ``tensors`` and of the entries of ``states`` before an update.

    The update itself writes the copies of large tensors (``copies``), in the same pass over memory.
    """

    def __init__(
        self, buffer: Tensor, tensors: Sequence[Tensor], states: Iterable[MutableMapping[str, Any]]
    ) -> None:
        self._entries = [(state, dict(state)) for state in states]
        held = [v for _, entries in self._entries for v in entries.values() if torch.is_tensor(v)]
        self.copies = TensorSnapshot(buffer, (*tensors, *held))
        self.copies.copy([tensor for tensor in held if not is_large(tensor)])  # counters of steps go up first

    def restore(self) -> None:
        """Restore everything."""
        self.copies.restore()
        for state, entries in self._entries:
            state.clear()
            state.update(entries)


UNDO_RATIO = 0.25
STEP_BYTES = 4  # the number of steps, which every state has


class UpdateState(Enum):
    """The states of a speculative update."""

    PENDING = "the optimizer's step has not decided yet"
    ACCEPTED = "the step confirmed the update"
    ORDINARY = "the step came before the update began, which is an ordinary one now"
    CANCELLED = "the update must not begin"


@dataclass
class SpeculativeUpdate:
    """An update of ``chunk`` with the expected ``options`` and ``factor``."""

    chunk: Chunk
    options: Options
    factor: float
    seen: PendingGradients
    """The gradients, which still belong to the chunk."""
    parts: int
    """How many summands the gradients had."""
    buffer: Tensor
    snapshot: ChunkSnapshot | None = None
    taken: PendingGradients | None = None
    """The gradients, released by the step."""
    is_begun: bool = False
    is_done: bool = False
    state: UpdateState = UpdateState.PENDING


class SpeculativeUpdates:
    """The speculative updates of a step; snapshots may take ``share`` of what the host holds, and with
    ``heeds_host`` nothing of the last quarter of the machine's memory.
    """

    def __init__(self, updates: HostUpdates, share: float, heeds_host: bool = False) -> None:
        self.updates, self.share, self.heeds_host = updates, share, heeds_host
        self.gradients, self.manager = updates.model.gradients, updates.manager
        self.chunks = self.gradients.chunks
        self._kinds = StateKinds(updates.optim)
        self._keeps = getattr(updates.optim, "keeps", False)
        self._buffers: SnapshotBuffers | None = None
        self._pending: dict[int, SpeculativeUpdate] = {}
        self._lock = threading.Lock()
        self.chunks.host.reclaim = _weakly(self.make_room)

    @property
    def has_pending(self) -> bool:
        """Whether there are updates about which no step has decided."""
        return bool(self._pending)

    def begin(self, chunk: Chunk, options: Options, factor: float) -> None:
        """Begin to update ``chunk`` with the gradients that it has now, if there is memory for a snapshot."""
        seen = self.gradients.of[chunk.index].peek()
        if chunk.index in self._pending or seen is None or not self._is_eligible(chunk, seen, factor):
            return
        buffer = self.buffers.get(self._bytes(chunk))
        if buffer is None:
            return
        parts = self.gradients.of[chunk.index].parts
        update = SpeculativeUpdate(chunk, options, factor, seen, parts, buffer)
        self._pending[chunk.index] = update
        priority = self.manager.trace.first_use(chunk.index)
        self.manager.worker.submit(
            chunk.index, priority, chunk.name, partial(self._run, update), seen.has_arrived
        )

    def _is_eligible(self, chunk: Chunk, seen: PendingGradients, factor: float) -> bool:
        """Whether ``chunk`` can be updated so, see [Note: what is not speculative]."""
        if factor != 1.0 and chunk.dtype == torch.float32:
            return False
        state, shadow = self.updates.optim.state, self.updates.shadow
        pieces = self.updates.stepped(chunk, seen.used)
        for piece in pieces:
            if not state.get(piece.value):
                return False
            if piece.value.dtype in HALF_DTYPES and not shadow.master_is_current(piece):
                return False
        return bool(pieces)  # other ranks may have all of it

    # Memory

    @property
    def buffers(self) -> SnapshotBuffers:
        if self._buffers is None:
            most = int(self.share * sum(map(self._bytes, self._hosted())))
            self._buffers = SnapshotBuffers(self.chunks.host, most, self._room)
        return self._buffers

    def _hosted(self) -> list[Chunk]:
        every = (self.chunks.chunks[i] for i in self.gradients.of)
        return [chunk for chunk in every if chunk.home is self.chunks.host]

    def _bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a snapshot of ``chunk``: weights and states, each aligned."""
        total = 0
        for piece in self.updates.chunk_pieces.pieces(chunk):
            dtypes = [piece.value.dtype, *(dtype for _, dtype in self._kinds.of(piece))]
            total += sum(aligned(piece.value.numel() * dtype.itemsize) for dtype in dtypes)
            total += aligned(STEP_BYTES)
        return total

    def _room(self) -> int:
        """Return the free bytes of the host without those for states that have not been made yet."""
        state_bytes = self.updates.state_bytes
        room = state_bytes.room() - sum(map(state_bytes.coming, self._hosted()))
        if not self.heeds_host:
            return room
        # other ranks of this machine ask at the same time: each takes little at once, and looks again
        spare = colo_get_cpu_memory_capacity() // 4
        return min(room, available_host_memory() - spare)

    def make_room(self) -> None:
        """Free snapshots: the host has no room for something that must be there."""
        if not self.manager.worker.is_current_thread:  # the worker cannot wait for itself
            self.roll_back()
        self.buffers.release()

    # The update

    @torch.no_grad()
    def _run(self, update: SpeculativeUpdate) -> None:
        """Do the job of ``update``, on the thread of the worker."""
        with self._lock:
            if update.state is UpdateState.CANCELLED:
                return
            update.is_begun = update.state is UpdateState.PENDING
        updates, chunk = self.updates, update.chunk
        if not update.is_begun:
            assert update.taken is not None
            updates.run(chunk, update.taken, update.options, update.factor)
            return
        shard, used = update.seen.shard, update.seen.used
        assert shard is not None
        update.seen.wait()
        self.gradients.of[chunk.index].settle()
        self.manager.timeline.note("try", chunk)
        pieces = updates.stepped(chunk, used)
        values, states = [p.value for p in pieces], [updates.optim.state[p.value] for p in pieces]
        update.snapshot = ChunkSnapshot(update.buffer, values, states)
        copies = update.snapshot.copies if self._keeps else None
        if copies is None:
            update.snapshot.copies.copy()
        updates.apply(chunk, shard, used, update.options, update.factor, copies)
        with self._lock:
            update.is_done = True
            if update.state is UpdateState.ACCEPTED:
                self._close(update)

    def _close(self, update: SpeculativeUpdate) -> None:
        """Free the snapshot and the gradients: the update will not be rolled back."""
        assert update.taken is not None
        assert update.taken.shard is not None
        self.gradients.memory.put(update.taken.shard)
        self.buffers.put(update.buffer)
        update.snapshot = None

    # The decision

    def decide(self, options: Options, factor: float) -> set[int]:
        """Accept the updates that were made as the step needs them, and roll back the others.

        Returns the numbers of the chunks whose update is done or on its way.
        """
        decided: set[int] = set()
        for index, update in self._pending.items():
            with self._lock:
                if not update.is_begun:
                    update.state, update.options, update.factor = UpdateState.ORDINARY, options, factor
                    self.buffers.put(update.buffer)
                elif (
                    update.factor == factor
                    and same_options(update.options, options)
                    and self._is_complete(update)
                ):
                    update.state = UpdateState.ACCEPTED
                else:
                    continue
                update.taken = self.gradients.of[update.chunk.index].release()
                if update.is_done:
                    self._close(update)
            decided.add(index)
        self._pending = {i: update for i, update in self._pending.items() if i not in decided}
        self.roll_back()
        return decided

    def _is_complete(self, update: SpeculativeUpdate) -> bool:
        """Whether no more gradients came for the chunk after the update had been asked for."""
        return self.gradients.of[update.chunk.index].parts == update.parts

    def roll_back(self) -> None:
        """Roll back all updates about which no step has decided."""
        pending, self._pending = list(self._pending.values()), {}
        self._roll_back(pending)

    def roll_back_chunk(self, chunk: Chunk) -> None:
        """Roll back the update of ``chunk``: the backward pass needs its weights again."""
        if chunk.index in self._pending:
            self._roll_back([self._pending.pop(chunk.index)])

    def _roll_back(self, pending: list[SpeculativeUpdate]) -> None:
        for update in pending:
            with self._lock:
                if not update.is_begun:
                    update.state = UpdateState.CANCELLED
        for update in pending:
            self.manager.worker.wait(update.chunk.index)
            if update.snapshot is not None:
                self._restore(update)
            self.buffers.put(update.buffer)

    def _restore(self, update: SpeculativeUpdate) -> None:
        assert update.snapshot is not None
        self.manager.timeline.note("undo", update.chunk)
        with self.updates.shadow.keep_current(self.updates.chunk_pieces.pieces(update.chunk)):
            update.snapshot.restore()
        update.snapshot = None


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``method`` while its object lives.

    Hooks of parameters, which the garbage collector cannot look into, refer to tiers: a strong reference
    would be a leak.
    """
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call


def can_roll_back(optim: Any) -> bool:
    """Whether updates of ``optim`` take a factor for the gradients and leave these as they are."""
    return isinstance(optim, MultiTensorOptimizer) and optim.divides


def same_options(some: Options, others: Options) -> bool:
    """Whether two options of all groups have the same values."""
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b)
    try:
        return bool(a == b)
    except (ValueError, TypeError):  # an array with its own idea of ==
        return False
