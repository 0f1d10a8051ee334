"""Gradients on their way from the backward pass to the homes of their chunks.

A gradient goes from ``param.grad`` into its chunk's buffer.  When the chunk's last one has come, the buffer is averaged over the
ranks, each keeps its shard, and the shard travels to the chunk's home, where it waits for the update.  A second pass adds to it.

[Note: one order]
All ranks must average chunks in one order, also where a rank skips a part of the model and never gets some gradients.  So a chunk
waits for its turn, and is averaged in the backward pass only if all ranks are about to (see ``agreement``): who waited there for one that has
skipped it would not help that one to gather weights.  What is left is averaged when the backward pass ends.  The order is, from the second step
on, the one in which the gradients of rank 0 were complete in the first.

[Note: late parts]
With reentrant checkpointing, a parameter that several segments use gets a gradient from each, one after the other.  A chunk that was
thought complete then gets more.  The first step finds these chunks; from then on they wait for the end of the backward pass.

Gradients of weights that several pipeline stages hold together, such as an embedding that is also the head.

Those of other stages must be added before the ranks average, after all micro-batches.  So the backward pass leaves them where it makes
them, in ``param.grad``; whoever runs the pipeline adds them up over the stages there (``colossalai.pipeline.tied``), and the step
sends them to the homes of their chunks like all others.

Gradients at the homes of their chunks, where they wait for the update: on the compute tier, on the host, or on the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh._compat import norms_of
from colossalai.mesh.parameter import SHARED_GROUP, own_grad, set_own_grad
from colossalai.zero.gemini.chunk import Chunk, ParamSlot, TensorState
from colossalai.zero.gemini.chunk_gradients import (
    ChunkGradients,
    HostGradientBuffers,
    PendingGradients,
    SpilledGradients,
)
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.tiers import PendingCopy, Tier


class TiedGradients:
    """The parameters of a model that other stages hold too, and the memory of their gradients on the compute tier."""

    def __init__(self, compute: Tier, make_room: Callable[[int, str], None]) -> None:
        self._compute, self._make_room = compute, make_room
        self.slots: dict[ParamSlot, Chunk] = {}
        self._counted: set[ParamSlot] = set()

    def find(self, chunks: Iterable[Chunk]) -> None:
        """Take the shared parameters among those of ``chunks``."""
        self.slots = {
            s: chunk for chunk in chunks for s in chunk.slots if s.trained and hasattr(s.param, SHARED_GROUP)
        }

    def has(self, chunk: Chunk) -> bool:
        """Whether ``chunk`` holds a shared parameter."""
        return chunk in self.slots.values()

    def has_any(self) -> bool:
        """Whether a gradient waits for the step."""
        return any(own_grad(slot.param) is not None for slot in self.slots)

    def keep(self, slot: ParamSlot) -> None:
        """The backward pass has left a gradient in ``slot.param.grad``: count its memory once."""
        if slot not in self._counted:
            nbytes, what = self._nbytes(slot), f"the gradient of {slot.name}"
            self._make_room(nbytes, what)
            self._compute.take(nbytes, what)
            self._counted.add(slot)

    def release(self) -> Iterator[tuple[Chunk, ParamSlot]]:
        """Yield every shared parameter that has a gradient, which is from then on in the account of whoever takes it."""
        for slot, chunk in self.slots.items():
            if slot in self._counted:
                self._counted.discard(slot)
                self._compute.give(self._nbytes(slot))
            if own_grad(slot.param) is not None:
                yield chunk, slot

    def clear(self) -> None:
        """Forget all of these gradients."""
        for _, slot in self.release():
            set_own_grad(slot.param, None)

    def _nbytes(self, slot: ParamSlot) -> int:
        return slot.numel * self.slots[slot].dtype.itemsize


class ReducedGradients:
    """The averaged gradients of all chunks; ``wait`` waits for a host buffer to come back."""

    def __init__(self, chunks: ChunkManager, wait: Callable[[], bool], host_buffers: int | None) -> None:
        self.chunks = chunks
        self.host = HostGradientBuffers(chunks, host_buffers, wait, self._spill_to_disk)
        self.spilled = SpilledGradients(chunks)
        self.of: dict[int, ChunkGradients] = {}
        self.settling = threading.Lock()  # an update on trial may ask for the same sum as the script
        self.norm_type: float | None = None  # the norm to take of gradients before they leave for the host

    @torch.no_grad()
    def settle(self, chunk: Chunk) -> None:
        """Wait on the CPU until the sum is complete in ``shard``."""
        state = self.of[chunk.index]
        with self.settling:
            state.move.finish()
            for more, move in state.extra:
                move.finish()
                assert state.shard is not None
                state.shard.add_(more)
                self.host.put(more)
            state.extra.clear()

    def look(self, chunk: Chunk) -> PendingGradients | None:
        """What ``take`` would hand over, which stays here; None if there is nothing, or something of it on the disk."""
        state = self.of[chunk.index]
        if state.shard is None or state.rows or chunk.home is self.chunks.compute:
            return None
        moves = [state.move, *(move for _, move in state.extra)]
        return PendingGradients(state.shard, moves, [], frozenset(state.used), [])

    def take(self, chunk: Chunk) -> PendingGradients | None:
        """Hand the gradients of a chunk that rests on the host over to its update; None if there are none."""
        state = self.of[chunk.index]
        if not state.is_begun or chunk.home is self.chunks.compute:
            return None
        with self.settling:
            moves = [state.move, *(move for _, move in state.extra)]
            more = [more for more, _ in state.extra]
            taken = PendingGradients(state.shard, moves, more, frozenset(state.used), state.rows)
            state.shard, state.move, state.norms, state.rows, state.parts = None, PendingCopy(), None, [], 0
            state.extra.clear()
        state.used.clear()
        return taken

    @torch.no_grad()
    def sum_up(self, chunk: Chunk, taken: PendingGradients) -> Tensor:
        """The averaged sum, complete; waits on the CPU for what is under way."""
        for move in taken.arriving:
            move.finish()
        for more in taken.extra:
            assert taken.shard is not None
            taken.shard.add_(more)
            self.host.put(more)
        taken.extra.clear()
        if not taken.rows:
            assert taken.shard is not None
            return taken.shard
        total = self.spilled.sum(chunk, taken.rows)
        if taken.shard is not None:
            total.add_(taken.shard)
            self.host.put(taken.shard)
        self.spilled.free(taken.rows)
        return total

    def put(self, shard: Tensor) -> None:
        """An update is done with what ``sum_up`` returned."""
        if not self.spilled.give(shard):
            self.host.put(shard)

    @torch.no_grad()
    def _spill_to_disk(self) -> bool:
        """Let the gradients of one chunk wait on the disk; those of the last layers, which are updated last."""
        for index in sorted(self.of, reverse=True) if self.chunks.shelf is not None else []:
            chunk, state = self.chunks.chunks[index], self.of[index]
            if state.shard is None or chunk.home is self.chunks.compute:
                continue
            self.settle(chunk)
            shard, state.shard, state.move = state.shard, None, PendingCopy()
            state.rows.append(self.spilled.write(chunk, shard))
            self.host.put(shard)
            return True
        return False

    def has_any(self) -> bool:
        return any(s.is_begun or s.direct or s.local is not None for s in self.of.values())

    def piece(self, chunk: Chunk, slot: ParamSlot) -> Tensor | None:
        """This rank's slice of the averaged gradient of ``slot``; None if it has had no gradient."""
        state = self.of[chunk.index]
        if slot in state.direct:
            return state.direct[slot]
        if not state.is_begun or slot not in state.used:
            return None
        if state.rows:  # its values are on the disk
            own = chunk.own_part(slot, chunk.shard)
            return (
                None if own is None else torch.full((), float("nan"), dtype=chunk.dtype).expand(own.numel())
            )
        return chunk.own_part(slot, state.shard)

    def norm(self, chunk: Chunk, slot: ParamSlot) -> Tensor | None:
        """The norm of ``piece``, if it is known."""
        state = self.of[chunk.index]
        if state.rows and state.norms is None:
            state.norms = self._norms_on_disk(chunk, state)
        return state.norms.get(slot) if state.norms is not None and slot in state.used else None

    def _norms_on_disk(self, chunk: Chunk, state: ChunkGradients) -> dict[ParamSlot, Tensor]:
        assert self.norm_type is not None
        while self.host.wait():  # updates of an earlier step use the same buffers
            pass
        self.settle(chunk)
        total = self.spilled.sum(chunk, state.rows)
        if state.shard is not None:
            total.add_(state.shard)
        parts = {slot: part for slot in chunk.slots if (part := chunk.own_part(slot, total)) is not None}
        norms = norms_of(list(parts.values()), self.norm_type) if parts else []
        self.spilled.give(total)
        return dict(zip(parts, norms, strict=True))


IN_FLIGHT = 3  # gradient buffers that may be on their way to the host while the next one fills


class Gradients(ReducedGradients):
    """All gradients of a model.

    ``make_room(nbytes, what)`` frees that much of the compute tier; ``wait`` waits for a host buffer to come back.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        make_room: Callable[[int, str], None],
        wait: Callable[[], bool],
        host_buffers: int | None = None,
    ) -> None:
        super().__init__(chunks, wait, host_buffers)
        self.make_room = make_room
        self.may_average: Callable[[Chunk], bool] = lambda chunk: True
        self.tied = TiedGradients(chunks.compute, make_room)
        self.order: list[int] = []
        self.late: set[int] = set()
        self.turn = 0
        self.sync = True
        self.done_order: list[int] = []
        self._flying: deque[tuple[PendingCopy, int]] = deque()
        self._agreed = False
        self._masks: tuple[Tensor, PendingCopy] | None = None

    def start(self, chunks: Iterable[Chunk]) -> None:
        """Take part in the averaging of ``chunks``, those with trained parameters."""
        self.of = {chunk.index: ChunkGradients() for chunk in chunks}
        self.trained = {
            i: frozenset(slot for slot in self.chunks.chunks[i].slots if slot.trained) for i in self.of
        }
        self.tied.find(self.chunks.chunks[i] for i in self.of)
        self.awaited = {i: slots - self.tied.slots.keys() for i, slots in self.trained.items()}
        self.order = sorted((i for i in self.of if self.awaited[i]), reverse=True)

    # From the backward pass into the buffer

    @torch.no_grad()
    def collect(self, chunk: Chunk, slot: ParamSlot) -> None:
        """Take the gradient that the backward pass left in ``slot.param.grad``."""
        grad, state = own_grad(slot.param), self.of[chunk.index]
        assert grad is not None
        set_own_grad(slot.param, None)
        if chunk.resident:
            self._collect_direct(chunk, slot, grad, state)
        else:
            if state.buffer is None:
                state.buffer = self._buffer(chunk)
            part = state.buffer[slot.offset : slot.end].view(slot.shape)
            (part.add_ if slot in state.arrived else part.copy_)(grad)
        state.arrived.add(slot)
        if slot.state is TensorState.COMPUTE:
            slot.to(TensorState.HOLD_AFTER_BWD)
            slot.to(TensorState.READY_FOR_REDUCE)

    def _collect_direct(self, chunk: Chunk, slot: ParamSlot, grad: Tensor, state: ChunkGradients) -> None:
        if slot in state.direct:
            state.direct[slot].add_(grad.reshape(-1))
            return
        nbytes, what = slot.numel * chunk.dtype.itemsize, f"the gradient of {slot.name}"
        self.make_room(nbytes, what)
        self.chunks.compute.take(nbytes, what)
        state.direct[slot] = grad.contiguous().view(-1)

    def _buffer(self, chunk: Chunk) -> Tensor:
        what = f"gradients of {chunk.name}"
        while len(self._flying) >= IN_FLIGHT:
            self.land()
        self.make_room(chunk.nbytes, what)
        self.chunks.compute.take(chunk.nbytes, what)
        # what no gradient fills is averaged as well where ranks share the chunk
        make = torch.empty if chunk.ranks.size == 1 else torch.zeros
        return make(chunk.size, dtype=chunk.dtype, device=self.chunks.device)

    def is_complete(self, chunk: Chunk) -> bool:
        return len(self.of[chunk.index].arrived) == len(self.awaited[chunk.index])

    # From the buffer to the home

    def ready(self, chunk: Chunk) -> list[Chunk]:
        """The gradients of ``chunk`` are complete: send it, if its turn has come, and those that waited for it; returns them."""
        state = self.of[chunk.index]
        if chunk.index in self.late or (state.sent and chunk.ranks.size > 1):
            return []
        if chunk.ranks.size == 1 or not self.sync:
            if state.sent:
                self.late.add(chunk.index)
            return self._send_all([chunk])
        sent: list[Chunk] = []
        while self.turn < len(self.order):
            following = self.chunks.chunks[self.order[self.turn]]
            if following.index not in self.late:
                if not self.is_complete(following):
                    break
                if self.may_average(following):
                    sent += self._send_all([following])
            self.turn += 1
        return sent

    def finish(self) -> Iterator[Chunk]:
        """The backward pass is over: send what is left, in the common order; yields each chunk when it is sent."""
        left = [self.chunks.chunks[i] for i in self.order]
        shared = bool(left) and left[0].ranks.size > 1 and self.sync
        again = [c for c in left if self.of[c.index].sent and self.of[c.index].arrived]
        rest = [c for c in left if self.of[c.index].arrived]
        if shared:
            unsent = [c for c in left if not self.of[c.index].sent]
            # before anything is agreed on: with NCCL other ranks may have sent these in the pass, and late ones after it
            for chunk in sorted(unsent, key=lambda c: c.index in self.late):
                self._send(chunk)
                yield chunk
            rest = again = self._agree_on(again)
        self.late.update(c.index for c in again)
        for chunk in rest:
            self._send(chunk)
            yield chunk
        if shared:
            self._share_used()
        for state in self.of.values():
            state.sent = False
        self.turn = 0

    def take_tied(self) -> None:
        """The gradients of shared weights have been added up over the stages: send them, on every rank of the stage."""
        if not self.tied.slots:
            return
        self.resolve()
        for chunk, slot in self.tied.release():
            self.collect(chunk, slot)
        sync, self.sync = self.sync, True  # a step follows
        for chunk in dict.fromkeys(self.tied.slots.values()):
            self._send(chunk)
            self.of[chunk.index].sent = False
        self.sync = sync
        if self.chunks.ranks.size > 1:
            self._share_used()

    def has_second(self) -> bool:
        """Whether a gradient came too late, so that this step fails."""
        return self._agreed and self.sync and any(s.sent and s.arrived for s in self.of.values())

    def _agree_on(self, again: list[Chunk]) -> list[Chunk]:
        """The chunks that some rank must average a second time [Note: late parts]; asked in the first step only."""
        if self._agreed:
            if again:
                raise RuntimeError(
                    f"a second gradient came for {again[0].name} after the ranks had averaged it; with reentrant activation"
                    " checkpointing, modules that several segments share must be used by all of them in the first step too."
                    " Use checkpoint(..., use_reentrant=False)"
                )
            return []
        ranks = self.chunks.ranks
        flags = torch.zeros(len(self.chunks.chunks), dtype=torch.int32, device=self.meeting)
        for chunk in again:
            flags[chunk.index] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=ranks.reduce)
        return [self.chunks.chunks[i] for i in self.order if flags.tolist()[i]]

    def _share_used(self) -> None:
        """Ask which parameters got a gradient on any rank; ``resolve`` reads the answer."""
        device = self.meeting
        marks = [
            int(slot in state.used or slot in state.untold)
            for i, state in self.of.items()
            for slot in self.chunks.chunks[i].slots
        ]
        for state in self.of.values():
            state.untold.clear()
        flags = torch.tensor(marks, dtype=torch.int32).to(device, non_blocking=True)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.chunks.ranks.reduce, async_op=True)
        if device.type == "cpu":
            self._masks = flags, PendingCopy(work=work)
            return
        assert work is not None
        work.wait()
        answer = torch.empty(len(marks), dtype=torch.int32, pin_memory=True)
        self._masks = answer, self.chunks.copier.start(answer, flags)

    def resolve(self) -> None:
        """A parameter has a gradient if it has one on any rank."""
        if self._masks is None:
            return
        flags, move = self._masks
        if move.work is not None:
            move.work.wait()
        move.finish()
        self._masks = None
        marks = iter(flags.tolist())
        for i, state in self.of.items():
            state.used.update(slot for slot in self.chunks.chunks[i].slots if next(marks))

    @property
    def meeting(self) -> torch.device:
        """Where small tensors are exchanged."""
        return torch.device("cpu") if self.chunks.ranks.staged else self.chunks.device

    def agree_on_order(self) -> None:
        """After the first step: from now on chunks are averaged in the order in which they were complete on the first rank."""
        order = [i for i in dict.fromkeys(self.done_order) if i in self.of]
        order += [i for i in self.order if i not in order]
        if self.chunks.ranks.size > 1:
            shared = torch.tensor(order, dtype=torch.int64, device=self.meeting)
            group = self.chunks.ranks.reduce
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
            order = shared.tolist()
        self.order = order
        self._agreed = True

    def _send_all(self, chunks: list[Chunk]) -> list[Chunk]:
        for chunk in chunks:
            self._send(chunk)
        return chunks

    @torch.no_grad()
    def _send(self, chunk: Chunk) -> None:
        state = self.of[chunk.index]
        state.used |= state.arrived
        state.untold |= state.arrived
        arrived, state.arrived = state.arrived, set()
        for slot in arrived:
            if slot.state is TensorState.READY_FOR_REDUCE:
                slot.to(TensorState.HOLD)
                if not chunk.present:
                    slot.to(TensorState.FREE)
        if chunk.resident:
            return
        if not self.sync and chunk.ranks.size > 1:
            compute, host = self.chunks.compute, self.chunks.host
            self._keep_local(chunk, state, compute if chunk.home is compute else host)
            return
        state.sent = True
        if state.local is not None:
            self._take_local(chunk, state)
        if state.buffer is None:
            if chunk.ranks.size == 1:
                return
            state.buffer = self._buffer(chunk)
        buffer, state.buffer = state.buffer, None
        if chunk.ranks.size == 1:
            for slot in self.trained[chunk.index] - arrived:  # it may be added to another part
                buffer[slot.offset : slot.end].zero_()
        own, move = self.chunks.reduce_chunk(chunk, buffer)
        self._send_home(chunk, state, buffer, own, move)

    def _send_home(
        self, chunk: Chunk, state: ChunkGradients, buffer: Tensor, own: Tensor, move: PendingCopy
    ) -> None:
        compute = self.chunks.compute
        if chunk.home is compute:
            move.wait()
            compute.give(chunk.nbytes)
            if state.shard is None:
                compute.take(chunk.shard_nbytes, f"gradients of {chunk.name}")
                state.shard = own
            else:
                state.shard.add_(own)
            return
        if state.extra:
            self.settle(chunk)
        state.parts += 1
        target = self.host.get(chunk)
        state.norms = self._norms_of(chunk, state, own, move)
        copy = self._download(target, own, move)
        copy.keep = [buffer, own]
        self._flying.append((copy, chunk.nbytes))
        self.chunks.bytes_down += chunk.shard_nbytes
        if not self.chunks.copier.is_async:
            self.land()
        done = PendingCopy(copy.event)
        if state.shard is None:
            state.shard, state.move = target, done
        else:
            with self.settling:
                state.extra.append((target, done))

    def _norms_of(
        self, chunk: Chunk, state: ChunkGradients, own: Tensor, move: PendingCopy
    ) -> dict[ParamSlot, Tensor] | None:
        """The norms of the gradients in ``own``, this rank's shard: the host would need many times as long for them."""
        if self.norm_type is None or state.is_begun:
            return None  # it is one summand of several
        move.wait()
        parts = {slot: part for slot in chunk.slots if (part := chunk.own_part(slot, own)) is not None}
        norms = norms_of(list(parts.values()), self.norm_type) if parts else []
        return dict(zip(parts, norms, strict=True))

    def _download(self, target: Tensor, own: Tensor, move: PendingCopy) -> PendingCopy:
        copier = self.chunks.copier
        if move.event is None or not copier.is_async:
            return copier.start(target, own)
        with torch.cuda.stream(copier.download):  # where it was averaged
            target.copy_(own, non_blocking=True)
            event: Any = torch.cuda.Event(blocking=True)
            event.record(copier.download)
        return PendingCopy(event)

    def land(self) -> None:
        """Free the oldest buffer whose copy to the host has been started, once that is done."""
        move, nbytes = self._flying.popleft()
        move.wait()
        self.chunks.compute.give(nbytes)

    # Sums that have not been averaged

    def _keep_local(self, chunk: Chunk, state: ChunkGradients, tier: Tier) -> None:
        """Add the buffer to the sum of this rank, which lies in ``tier`` if it is new."""
        buffer, state.buffer = state.buffer, None
        if buffer is None:
            return
        if state.local is None:
            state.local_tier = tier
            if tier is self.chunks.compute:
                state.local = buffer
                return
            tier.take(chunk.nbytes, f"gradients of {chunk.name}")
            state.local = buffer.cpu()
        else:
            state.local.add_(buffer.to(state.local.device))
        self.chunks.compute.give(chunk.nbytes)

    def _take_local(self, chunk: Chunk, state: ChunkGradients) -> None:
        local, state.local = state.local, None
        assert local is not None
        assert state.local_tier is not None
        if state.buffer is None:
            state.buffer = self._buffer(chunk)
            state.buffer.copy_(local)
        else:
            state.buffer.add_(local.to(self.chunks.device))
        state.local_tier.give(chunk.nbytes)

    @torch.no_grad()
    def spill(self) -> bool:
        """Let the gradients of one chunk leave the compute tier before they are complete; False if there are none."""
        if self._flying:
            self.land()
            return True
        for index, state in self.of.items():
            if state.buffer is None:
                continue
            chunk = self.chunks.chunks[index]
            if chunk.ranks.size == 1:
                self._send(chunk)
            else:
                self._keep_local(chunk, state, self.chunks.host)
            return True
        return False

    # The end

    def clear(self, chunk: Chunk) -> None:
        """The gradients of ``chunk`` have been used, or are not wanted."""
        state = self.of[chunk.index]
        compute = self.chunks.compute
        for slot in state.direct:
            compute.give(slot.numel * chunk.dtype.itemsize)
        state.direct.clear()
        if state.buffer is not None:
            state.buffer = None
            compute.give(chunk.nbytes)
        if state.local is not None and state.local_tier is not None:
            state.local = None
            state.local_tier.give(chunk.nbytes)
        self.settle(chunk)
        if state.shard is not None:
            if chunk.home is compute:
                compute.give(chunk.shard_nbytes)
            else:
                self.host.put(state.shard)
            state.shard, state.move = None, PendingCopy()
        self.spilled.free(state.rows)
        state.rows, state.norms, state.parts = [], None, 0
        state.arrived.clear()
        state.used.clear()
        state.untold.clear()
        state.sent = False
