"""The gradients of one chunk, from the backward pass to the update, and the memory that they need.

``ChunkGradients`` is the state of one chunk.  ``GradientMemory`` is what the gradients of all chunks share:
room on the compute tier, buffers on the host, and rows on the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh._compat import norms_of
from colossalai.utils.disk import Buffers
from colossalai.zero.gemini.chunk import Chunk, ParamSlot, TensorState
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.disk_tier import TierMemory
from colossalai.zero.gemini.tiers import PendingCopy, Tier

IN_FLIGHT = 3  # gradient buffers that may be on their way to the host while the next one fills


class HostGradientBuffers:
    """Gradient buffers on the host, which are reused: page-locked memory takes long to allocate.

    Where their number is limited (``most``), or there is a disk, each buffer is large enough for any chunk.
    ``wait`` waits until an update returns a buffer, ``spill`` moves the gradients of one chunk to the disk;
    both return whether they did so.  Only the thread of the script calls ``get``; any thread may call
    ``put``.
    """

    def __init__(
        self, chunks: ChunkManager, most: int | None, wait: Callable[[], bool], spill: Callable[[], bool]
    ) -> None:
        self.chunks, self.most, self.wait, self.spill = chunks, most, wait, spill
        self.made = 0
        self._free: dict[int, list[Tensor]] = {}  # by their size in bytes
        self._whole: dict[int, Tensor] = {}  # by the address of the part that ``get`` returned

    @property
    def missing_bytes(self) -> int:
        """Bytes of the host that buffers may still take, if their number is limited."""
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
                continue  # if no update will return a buffer, the limit must be exceeded
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
    """Gradients that wait on the disk, and the two buffers on the host in which their sum is made."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self._buffers: Buffers | None = None
        self._lent: dict[int, Tensor] = {}
        self._count = 0

    def reserve(self, nbytes: int) -> None:
        """Provide buffers for sums of up to ``nbytes``."""
        self._buffers = Buffers(2, TierMemory(self.chunks.host, "gradients on their way from the disk"))
        self._buffers.fit(nbytes)
        self.chunks.passing.append(self._buffers)

    def write(self, chunk: Chunk, shard: Tensor) -> str:
        """Write ``shard`` and return the name of its row."""
        shelf = self.chunks.shelf
        assert shelf is not None
        self._count += 1
        name, what = f"gradients {chunk.index} {self._count}", f"the gradients of {chunk.name}"
        shelf.room(name, shard.nbytes, what)
        shelf.write(name, shard, what).finish()
        return name

    def sum(self, chunk: Chunk, rows: Sequence[str]) -> Tensor:
        """Return the sum of ``rows``, in a buffer that ``give`` takes back."""
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
        self._lent[buffer.data_ptr()] = buffer
        found = buffer[: chunk.shard_nbytes]
        if (pending := shelf.read(row, found)) is not None:
            pending.wait()
        return found.view(chunk.dtype)

    def give(self, shard: Tensor) -> bool:
        """Take a buffer back; return False if ``shard`` is not one of these buffers."""
        buffer = self._lent.pop(shard.data_ptr(), None)
        if buffer is None or self._buffers is None:
            return False
        self._buffers.give(buffer)
        return True

    def free(self, rows: Sequence[str]) -> None:
        for row in rows:
            assert self.chunks.shelf is not None
            self.chunks.shelf.free(row)


class GradientMemory:
    """The memory for the gradients of all chunks: on the compute tier, on the host and on the disk.

    ``make_room(nbytes, what)`` frees that much of the compute tier.  ``wait`` and ``spill`` make host buffers
    free, see ``HostGradientBuffers``.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        make_room: Callable[[int, str], None],
        wait: Callable[[], bool],
        spill: Callable[[], bool],
        host_buffers: int | None,
    ) -> None:
        self.chunks, self.make_room = chunks, make_room
        self.host = HostGradientBuffers(chunks, host_buffers, wait, spill)
        self.spilled = SpilledGradients(chunks)
        self.norm_type: float | None = None  # the norm to take of gradients before they leave for the host
        self._in_flight: deque[tuple[PendingCopy, int]] = deque()

    def reserve(self, nbytes: int, what: str) -> None:
        """Count ``nbytes`` of the compute tier, and make room for them."""
        self.make_room(nbytes, what)
        self.chunks.compute.reserve(nbytes, what)

    def whole_buffer(self, chunk: Chunk) -> Tensor:
        """Allocate a buffer for the gradients of the whole of ``chunk`` on the compute tier."""
        while len(self._in_flight) >= IN_FLIGHT:
            self.land()
        self.reserve(chunk.nbytes, f"gradients of {chunk.name}")
        # elements that no gradient fills are averaged as well where ranks share the chunk
        make = torch.empty if chunk.ranks.size == 1 else torch.zeros
        return make(chunk.size, dtype=chunk.dtype, device=self.chunks.device)

    def download(self, chunk: Chunk, target: Tensor, buffer: Tensor, own: Tensor, before: PendingCopy) -> Any:
        """Copy ``own`` to ``target`` on the host, after ``before``; return the event of the copy, if it has
        one.

        ``buffer``, the whole that ``own`` was reduced from, counts as used until ``land``.
        """
        copy = self._copy(target, own, before)
        copy.keep = [buffer, own]
        self._in_flight.append((copy, chunk.nbytes))
        self.chunks.bytes_down += chunk.shard_nbytes
        if not self.chunks.copier.is_async:
            self.land()
        return copy.event

    def _copy(self, target: Tensor, own: Tensor, before: PendingCopy) -> PendingCopy:
        copier = self.chunks.copier
        if before.event is None or not copier.is_async:
            return copier.start(target, own)
        with torch.cuda.stream(copier.download):  # the stream in which it was averaged
            target.copy_(own, non_blocking=True)
            event: Any = torch.cuda.Event(blocking=True)
            event.record(copier.download)
        return PendingCopy(event)

    def land(self) -> bool:
        """Free the oldest buffer on its way to the host, once its copy is done; return False if there is
        none.
        """
        if not self._in_flight:
            return False
        copy, nbytes = self._in_flight.popleft()
        copy.wait()
        self.chunks.compute.release(nbytes)
        return True

    def put(self, shard: Tensor) -> None:
        """Take back the buffer of a sum that an update has used."""
        if not self.spilled.give(shard):
            self.host.put(shard)


@dataclass
class PendingGradients:
    """The sum of a chunk's gradients that an update has taken over, with the summands that are still to be
    added.
    """

    chunk: Chunk
    shard: Tensor | None
    copies: list[PendingCopy]
    summands: list[Tensor]
    used: frozenset[ParamSlot]
    rows: list[str]

    def has_arrived(self) -> bool:
        """Whether everything has arrived on the host."""
        return all(copy.event is None or copy.event.query() for copy in self.copies)

    def wait(self) -> None:
        """Wait on the CPU until everything has arrived on the host."""
        for copy in self.copies:
            copy.finish()

    @torch.no_grad()
    def sum_up(self, memory: GradientMemory) -> Tensor:
        """Return the complete sum, whose buffer ``memory.put`` takes back; wait on the CPU for what is on its
        way.
        """
        self.wait()
        for more in self.summands:
            assert self.shard is not None
            self.shard.add_(more)
            memory.host.put(more)
        self.summands.clear()
        if not self.rows:
            assert self.shard is not None
            return self.shard
        total = memory.spilled.sum(self.chunk, self.rows)
        if self.shard is not None:
            total.add_(self.shard)
            memory.host.put(self.shard)
        memory.spilled.free(self.rows)
        return total


class ChunkGradients:
    """The gradients of one chunk.

    Four verbs move them along, in this order:

    - ``add``: the gradient of a parameter goes from ``param.grad`` into ``buffer``, on the compute tier;
    - ``reduce``: the ranks average ``buffer``, and this rank's shard adds to the sum at the chunk's home;
    - ``settle``: wait until the sum is complete in ``shard``;
    - ``release``: hand the sum over to an update, which owns it from then on.

    ``clear`` drops all gradients.  ``evict_buffer`` and ``evict_shard`` make room on the compute tier and on
    the host, and leave the sum as it is.

    Two threads use this object: the one of the backward pass and the step calls everything, the update worker
    calls ``settle`` for a speculative update.  ``lock`` guards changes of the sum (``shard``, ``copy``,
    ``summands``, ``rows``, ``norms``, ``parts``, ``used``); the rest belongs to the first thread.
    Invariants, whenever the lock is free:

    - every gradient since the last ``release`` or ``clear`` is in exactly one place: ``buffer``, ``local``,
      ``direct``, or the sum, which is ``shard`` + ``summands`` + ``rows``;
    - ``summands`` is empty if ``shard`` is None; both ``summands`` and ``rows`` are if the chunk's home is
      the compute tier;
    - ``arrived`` names the parameters whose gradients came since the last ``reduce``, ``used`` those before,
      and those of which only other ranks have a gradient;
    - ``parts`` grows with every summand that goes to the host: equal numbers mean the same sum;
    - the lock is never held while waiting for a host buffer, which an update may hold that waits for the
      lock.
    """

    def __init__(self, chunk: Chunk, memory: GradientMemory) -> None:
        self.chunk, self.memory, self.chunks = chunk, memory, memory.chunks
        self.trained = frozenset(slot for slot in chunk.slots if slot.trained)
        self.lock = threading.Lock()
        # on the compute tier, before the ranks have averaged
        self.buffer: Tensor | None = None  # of the whole chunk, filled by the backward pass
        self.arrived: set[ParamSlot] = set()
        self.is_reduced = False  # whether the buffer of this backward pass has been averaged already
        self.direct: dict[
            ParamSlot, Tensor
        ] = {}  # of a chunk that never leaves, as the backward pass made them
        # sums of whole buffers that have not been averaged (``no_sync``, or no room on the compute tier)
        self.local: Tensor | None = None
        self.local_tier: Tier | None = None
        # the averaged sum of all passes since the last step, at the chunk's home
        self.shard: Tensor | None = None
        self.copy = PendingCopy()  # which fills ``shard``
        self.summands: list[tuple[Tensor, PendingCopy]] = []  # to be added to ``shard``, still arriving
        self.rows: list[str] = []  # summands on the disk
        self.parts = 0
        self.norms: dict[ParamSlot, Tensor] | None = None  # of the sum; None where they are not known
        self.used: set[ParamSlot] = set()
        # parameters with a gradient that the other ranks have not been told of; an early update may have
        # taken it
        self.untold: set[ParamSlot] = set()

    # Questions

    @property
    def is_begun(self) -> bool:
        """Whether anything of the sum is at home."""
        return self.shard is not None or bool(self.rows)

    @property
    def is_on_disk(self) -> bool:
        """Whether a part of the sum waits on the disk."""
        return bool(self.rows)

    def has_any(self) -> bool:
        """Whether there is a gradient that a step could use."""
        return self.is_begun or bool(self.direct) or self.local is not None

    def has(self, slot: ParamSlot) -> bool:
        """Whether ``slot`` has had a gradient since the last step."""
        return slot in self.arrived or slot in self.used or slot in self.direct

    def slots(self) -> set[ParamSlot]:
        """The parameters that have had a gradient since the last step."""
        return self.arrived.union(self.used, self.direct)

    def piece(self, slot: ParamSlot) -> Tensor | None:
        """This rank's slice of the averaged gradient of ``slot``; None if it has had no gradient, NaN if it
        is on the disk.
        """
        if slot in self.direct:
            return self.direct[slot]
        if not self.is_begun or slot not in self.used:
            return None
        if not self.rows:
            return self.chunk.own_part(slot, self.shard)
        own = self.chunk.own_part(slot, self.chunk.shard)
        if own is None:
            return None
        return torch.full((), float("nan"), dtype=self.chunk.dtype).expand(own.numel())

    def norm(self, slot: ParamSlot) -> Tensor | None:
        """The norm of ``piece``, if it is known."""
        if self.rows and self.norms is None:
            norms = self._norms_on_disk()
            with self.lock:
                self.norms = norms
        return self.norms.get(slot) if self.norms is not None and slot in self.used else None

    def forget_norms(self) -> None:
        """Drop the known norms: the gradients have changed, or another norm is wanted."""
        with self.lock:
            self.norms = None

    def mark_used(self, slots: Iterable[ParamSlot]) -> None:
        """Note that another rank has a gradient of ``slots``, which is zero on this one."""
        slots = list(slots)
        if self.chunk.resident:  # experts, of which only this rank has these
            for slot in slots:
                if slot not in self.direct:
                    self._add_direct(slot, self.chunk.flat.new_zeros(slot.shape))
        with self.lock:
            self.used.update(slots)

    # Add

    @torch.no_grad()
    def add(self, slot: ParamSlot, grad: Tensor) -> None:
        """Take a gradient of the backward pass."""
        if self.chunk.ranks.pieces > 1:
            grad = grad / self.chunk.ranks.pieces
        if self.chunk.resident:
            self._add_direct(slot, grad)
        else:
            if self.buffer is None:
                self.buffer = self.memory.whole_buffer(self.chunk)
            part = self.buffer[slot.offset : slot.end].view(slot.shape)
            (part.add_ if slot in self.arrived else part.copy_)(grad)
        self.arrived.add(slot)
        if slot.state is TensorState.COMPUTE:
            slot.to(TensorState.HOLD_AFTER_BWD)
            slot.to(TensorState.READY_FOR_REDUCE)

    def _add_direct(self, slot: ParamSlot, grad: Tensor) -> None:
        if slot in self.direct:
            self.direct[slot].add_(grad.reshape(-1))
            return
        self.memory.reserve(slot.numel * self.chunk.dtype.itemsize, f"the gradient of {slot.name}")
        self.direct[slot] = grad.contiguous().view(-1)

    # Reduce

    @torch.no_grad()
    def reduce(self, sync: bool) -> None:
        """Average the buffer over the ranks and send this rank's shard home; without ``sync`` add it to the
        local sum.
        """
        chunk = self.chunk
        arrived = self._end_of_arrivals()
        if chunk.resident:
            return
        if not sync and chunk.ranks.size > 1:
            compute, host = self.chunks.compute, self.chunks.host
            self._keep_local(compute if chunk.home is compute else host)
            return
        self.is_reduced = True
        if self.local is not None:
            self._take_local()
        if self.buffer is None:
            if self.chunks.ranks.size == 1:
                return
            # other ranks may have gradients; of experts that this one alone has, of other experts
            self.buffer = self.memory.whole_buffer(chunk)
        buffer, self.buffer = self.buffer, None
        if chunk.ranks.size == 1:
            for slot in self.trained - arrived:  # it may be added to another part
                buffer[slot.offset : slot.end].zero_()
        own, copy = self.chunks.reduce_chunk(chunk, buffer)
        if chunk.home is self.chunks.compute:
            self._sum_on_compute(own, copy)
        else:
            self._sum_on_host(buffer, own, copy)

    def _end_of_arrivals(self) -> set[ParamSlot]:
        """Return the parameters whose gradients are in the buffer; from now on they count as used."""
        with self.lock:
            self.used |= self.arrived
        self.untold |= self.arrived
        arrived, self.arrived = self.arrived, set()
        for slot in arrived:
            if slot.state is TensorState.READY_FOR_REDUCE:
                slot.to(TensorState.HOLD)
                if not self.chunk.present:
                    slot.to(TensorState.FREE)
        return arrived

    def _sum_on_compute(self, own: Tensor, copy: PendingCopy) -> None:
        compute = self.chunks.compute
        copy.wait()
        compute.release(self.chunk.nbytes)
        with self.lock:
            if self.shard is None:
                compute.reserve(self.chunk.shard_nbytes, f"gradients of {self.chunk.name}")
                self.shard = own
            else:
                self.shard.add_(own)

    def _sum_on_host(self, buffer: Tensor, own: Tensor, copy: PendingCopy) -> None:
        if self.summands:
            self.settle()
        target = self.memory.host.get(self.chunk)
        norms = self._norms_of(own, copy)
        done = PendingCopy(self.memory.download(self.chunk, target, buffer, own, copy))
        with self.lock:
            self.parts += 1
            self.norms = norms
            if self.shard is None:
                self.shard, self.copy = target, done
            else:
                self.summands.append((target, done))

    def _norms_of(self, own: Tensor, copy: PendingCopy) -> dict[ParamSlot, Tensor] | None:
        """The norms of the gradients in ``own``, this rank's shard: the host would need many times as long
        for them.
        """
        if self.memory.norm_type is None or self.is_begun:
            return None  # it is one summand of several
        copy.wait()
        return self._norms(own, self.memory.norm_type)

    def _norms(self, shard: Tensor, norm_type: float) -> dict[ParamSlot, Tensor]:
        chunk = self.chunk
        parts = {slot: part for slot in chunk.slots if (part := chunk.own_part(slot, shard)) is not None}
        norms = norms_of(list(parts.values()), norm_type) if parts else []
        return dict(zip(parts, norms, strict=True))

    def _norms_on_disk(self) -> dict[ParamSlot, Tensor]:
        memory = self.memory
        assert memory.norm_type is not None
        while memory.host.wait():  # updates of an earlier step use the same buffers
            pass
        self.settle()
        total = memory.spilled.sum(self.chunk, self.rows)
        if self.shard is not None:
            total.add_(self.shard)
        norms = self._norms(total, memory.norm_type)
        memory.spilled.give(total)
        return norms

    # Sums that have not been averaged

    def _keep_local(self, tier: Tier) -> None:
        """Add the buffer to the sum of this rank, which lies in ``tier`` if it is new."""
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return
        if self.local is None:
            self.local_tier = tier
            if tier is self.chunks.compute:
                self.local = buffer
                return
            tier.reserve(self.chunk.nbytes, f"gradients of {self.chunk.name}")
            self.local = buffer.cpu()
        else:
            self.local.add_(buffer.to(self.local.device))
        self.chunks.compute.release(self.chunk.nbytes)

    def _take_local(self) -> None:
        local, self.local = self.local, None
        assert local is not None
        assert self.local_tier is not None
        if self.buffer is None:
            self.buffer = self.memory.whole_buffer(self.chunk)
            self.buffer.copy_(local)
        else:
            self.buffer.add_(local.to(self.chunks.device))
        self.local_tier.release(self.chunk.nbytes)

    # Settle and release

    @torch.no_grad()
    def settle(self) -> None:
        """Wait on the CPU until the sum is complete in ``shard``; what is on the disk stays there."""
        with self.lock:
            self.copy.finish()
            for more, copy in self.summands:
                copy.finish()
                assert self.shard is not None
                self.shard.add_(more)
                self.memory.host.put(more)
            self.summands.clear()

    def peek(self) -> PendingGradients | None:
        """What ``release`` would hand over, which stays here; None if there is nothing, or a part of it on
        the disk.
        """
        with self.lock:
            if self.shard is None or self.rows or self.chunk.home is self.chunks.compute:
                return None
            copies = [self.copy, *(copy for _, copy in self.summands)]
            return PendingGradients(self.chunk, self.shard, copies, [], frozenset(self.used), [])

    def release(self) -> PendingGradients | None:
        """Hand the sum of a chunk that rests on the host or the disk over to its update; None if there is
        none.
        """
        with self.lock:
            if not self.is_begun or self.chunk.home is self.chunks.compute:
                return None
            copies = [self.copy, *(copy for _, copy in self.summands)]
            more = [more for more, _ in self.summands]
            taken = PendingGradients(self.chunk, self.shard, copies, more, frozenset(self.used), self.rows)
            self.shard, self.copy, self.norms, self.rows, self.parts = None, PendingCopy(), None, [], 0
            self.summands.clear()
            self.used.clear()
        return taken

    def clear(self) -> None:
        """Drop all gradients: they have been used, or are not wanted."""
        chunk, compute = self.chunk, self.chunks.compute
        for slot in self.direct:
            compute.release(slot.numel * chunk.dtype.itemsize)
        self.direct.clear()
        if self.buffer is not None:
            self.buffer = None
            compute.release(chunk.nbytes)
        if self.local is not None and self.local_tier is not None:
            self.local = None
            self.local_tier.release(chunk.nbytes)
        self.settle()
        with self.lock:
            if self.shard is not None:
                if chunk.home is compute:
                    compute.release(chunk.shard_nbytes)
                else:
                    self.memory.host.put(self.shard)
                self.shard, self.copy = None, PendingCopy()
            self.memory.spilled.free(self.rows)
            self.rows, self.norms, self.parts = [], None, 0
            self.used.clear()
        self.arrived.clear()
        self.untold.clear()
        self.is_reduced = False

    # Room

    @torch.no_grad()
    def evict_buffer(self) -> bool:
        """Let an incomplete buffer leave the compute tier; return False if there is none."""
        if self.buffer is None:
            return False
        if self.chunk.ranks.size == 1:
            self.reduce(sync=True)
        else:
            self._keep_local(self.chunks.host)
        return True

    @torch.no_grad()
    def move_shard(self, tier: Tier) -> None:
        """Bring the sum from the host to ``tier``, where the chunk rests from now on."""
        self.settle()
        with self.lock:
            if self.shard is not None:
                own = tier.empty(self.chunk.shard_size, self.chunk.dtype, f"gradients of {self.chunk.name}")
                own.copy_(self.shard)
                self.memory.host.put(self.shard)
                self.shard, self.copy = own, PendingCopy()

    @torch.no_grad()
    def evict_shard(self) -> bool:
        """Move the sum from the host to the disk; return False if there is nothing on the host."""
        if self.shard is None or self.chunk.home is self.chunks.compute:
            return False
        self.settle()
        row = self.memory.spilled.write(self.chunk, self.shard)
        with self.lock:
            self.memory.host.put(self.shard)
            self.shard, self.copy = None, PendingCopy()
            self.rows.append(row)
        return True
