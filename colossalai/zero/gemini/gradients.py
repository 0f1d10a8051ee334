"""All gradients of a model: when each chunk is reduced, and in which order.

The backward pass adds each gradient to the buffer of its chunk.  When the last one has come, the ranks
average the buffer, each keeps its shard, and the shard goes to the chunk's home, where it waits for the
update.  A second pass adds to it.  ``chunk_gradients`` holds the state of one chunk; this module decides what
is done with which chunk when.

[Note: one order]
All ranks must reduce chunks in one order, also where a rank skips a part of the model and never gets some
gradients. So a chunk waits for its turn, and is reduced in the backward pass only if all ranks are about to
(see ``RankAgreement``): a rank that waited there for one that has skipped the chunk would not help that one
to gather weights.  What is left is reduced when the backward pass ends.  From the second step on, the order
is the one in which the gradients of rank 0 were complete in the first step.

[Note: late parts]
With reentrant checkpointing, a parameter that several segments use gets a gradient from each, one after the
other.  A chunk that was thought complete then gets more.  The first step finds these chunks; from then on
they wait for the end of the backward pass.

[Note: experts]
So do chunks of experts.  A rank whose experts get no token has no gradient of them; if others met to average
theirs in the backward pass, it would wait for these in the layer, where tokens are exchanged, and they for
it.  Also where a rank has no other to meet, all must evict chunks at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh.parameter import SHARED_GROUP, own_grad, set_own_grad
from colossalai.utils.parallel import broadcast_from_first
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_gradients import ChunkGradients, GradientMemory
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.tiers import PendingCopy


class TiedGradients:
    """The gradients of weights that several pipeline stages hold, such as an embedding that is also the head.

    The stages must add up these gradients after all micro-batches, before the ranks average them.  So the
    backward pass leaves them in ``param.grad``, ``colossalai.pipeline.tied`` adds them up there, and the step
    reduces them like all others.  This object knows the parameters, and counts the memory of their gradients
    on the compute tier.
    """

    def __init__(self, memory: GradientMemory) -> None:
        self._memory = memory
        self.slots: dict[ParamSlot, Chunk] = {}
        self._counted: set[ParamSlot] = set()

    def find(self, chunks: Iterable[Chunk]) -> None:
        """Look for tied parameters among those of ``chunks``."""
        self.slots = {
            s: chunk for chunk in chunks for s in chunk.slots if s.trained and hasattr(s.param, SHARED_GROUP)
        }

    def has(self, chunk: Chunk) -> bool:
        """Whether ``chunk`` holds a tied parameter."""
        return chunk in self.slots.values()

    def has_any(self) -> bool:
        """Whether a gradient waits for the step."""
        return any(own_grad(slot.param) is not None for slot in self.slots)

    def keep(self, slot: ParamSlot) -> None:
        """Count, once, the gradient that the backward pass has left in ``slot.param.grad``."""
        if slot not in self._counted:
            self._memory.reserve(self._nbytes(slot), f"the gradient of {slot.name}")
            self._counted.add(slot)

    def release(self) -> Iterator[tuple[Chunk, ParamSlot]]:
        """Yield every tied parameter that has a gradient, which the caller counts from then on."""
        for slot, chunk in self.slots.items():
            if slot in self._counted:
                self._counted.discard(slot)
                self._memory.chunks.compute.release(self._nbytes(slot))
            if own_grad(slot.param) is not None:
                yield chunk, slot

    def clear(self) -> None:
        """Drop all of these gradients."""
        for _, slot in self.release():
            set_own_grad(slot.param, None)

    def _nbytes(self, slot: ParamSlot) -> int:
        return slot.numel * self.slots[slot].dtype.itemsize


class Gradients:
    """The gradients of all chunks of a model.

    ``make_room(nbytes, what)`` frees that much of the compute tier; ``wait`` waits until an update returns a
    host buffer; ``may_reduce(chunk)`` says whether all ranks are about to reduce ``chunk``.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        make_room: Callable[[int, str], None],
        wait: Callable[[], bool],
        may_reduce: Callable[[Chunk], bool],
        host_buffers: int | None = None,
    ) -> None:
        self.chunks, self.may_reduce = chunks, may_reduce
        self.memory = GradientMemory(chunks, make_room, wait, self._evict_shard, host_buffers)
        self.tied = TiedGradients(self.memory)
        self.of: dict[int, ChunkGradients] = {}
        self.awaited: dict[int, frozenset[ParamSlot]] = {}
        self.order: list[int] = []
        self.late: set[int] = set()
        self.turn = 0
        self.sync = True
        self.done_order: list[int] = []
        self._agreed = False
        self._masks: tuple[Tensor, PendingCopy] | None = None

    def start(self, chunks: Iterable[Chunk]) -> None:
        """Take part in the reduction of ``chunks``, those with trained parameters."""
        self.of = {chunk.index: ChunkGradients(chunk, self.memory) for chunk in chunks}
        self.tied.find(state.chunk for state in self.of.values())
        self.awaited = {i: state.trained - self.tied.slots.keys() for i, state in self.of.items()}
        self.order = sorted((i for i in self.of if self.awaited[i]), reverse=True)
        self.late = {i for i, state in self.of.items() if state.chunk.ranks.pieces > 1}  # [Note: experts]

    def has_any(self) -> bool:
        """Whether a chunk has gradients that a step could use."""
        return any(state.has_any() for state in self.of.values())

    # In the backward pass

    def add(self, chunk: Chunk, slot: ParamSlot) -> None:
        """Take the gradient that the backward pass left in ``slot.param.grad``."""
        grad = own_grad(slot.param)
        assert grad is not None
        set_own_grad(slot.param, None)
        self.of[chunk.index].add(slot, grad)

    def is_complete(self, chunk: Chunk) -> bool:
        return len(self.of[chunk.index].arrived) == len(self.awaited[chunk.index])

    def reduce_complete(self, chunk: Chunk) -> list[Chunk]:
        """Reduce ``chunk``, whose gradients are complete, if its turn has come, and those that waited for it.

        Returns the chunks that were reduced.
        """
        state = self.of[chunk.index]
        if chunk.index in self.late or (state.is_reduced and chunk.ranks.size > 1):
            return []
        if chunk.ranks.size == 1 or not self.sync:
            if state.is_reduced:
                self.late.add(chunk.index)
            state.reduce(self.sync)
            return [chunk]
        reduced: list[Chunk] = []
        while self.turn < len(self.order):
            following = self.of[self.order[self.turn]]
            if following.chunk.index not in self.late:
                if not self.is_complete(following.chunk):
                    break
                if self.may_reduce(following.chunk):
                    following.reduce(self.sync)
                    reduced.append(following.chunk)
            self.turn += 1
        return reduced

    def finish(self) -> Iterator[Chunk]:
        """Reduce what is left when the backward pass is over, in the common order; yield each chunk when it
        is done.
        """
        left = [self.of[i] for i in self.order]
        shared = bool(left) and self.chunks.ranks.size > 1 and self.sync
        again = [state for state in left if state.is_reduced and state.arrived]
        rest = [state for state in left if state.arrived or state.chunk.ranks.pieces > 1]
        if shared:
            unreduced = [state for state in left if not state.is_reduced]
            # before the ranks agree: with NCCL other ranks may have reduced these in the pass, and late ones
            # after it
            for state in sorted(unreduced, key=lambda s: s.chunk.index in self.late):
                state.reduce(self.sync)
                yield state.chunk
            alone = [state for state in again if state.chunk.ranks.size == 1]  # no other rank has to know
            rest = again = self._agree_on([state for state in again if state not in alone]) + alone
        self.late.update(state.chunk.index for state in again)
        for state in rest:
            state.reduce(self.sync)
            yield state.chunk
        if shared:
            self._share_used()
        for state in self.of.values():
            state.is_reduced = False
        self.turn = 0

    def has_second(self) -> bool:
        """Whether a gradient came after its chunk had been reduced, so that this step fails."""
        shared = (state for state in self.of.values() if state.chunk.ranks.size > 1)
        return self._agreed and self.sync and any(state.is_reduced and state.arrived for state in shared)

    def _agree_on(self, again: list[ChunkGradients]) -> list[ChunkGradients]:
        """The chunks that some rank must reduce a second time [Note: late parts]; asked in the first step
        only.
        """
        if self._agreed:
            if again:
                raise RuntimeError(
                    f"a second gradient came for {again[0].chunk.name} after the ranks had averaged it; with"
                    " reentrant activation checkpointing, modules that several segments share must be used by"
                    " all of them in the first step too. Use checkpoint(..., use_reentrant=False)"
                )
            return []
        flags = torch.zeros(len(self.chunks.chunks), dtype=torch.int32, device=self.meeting)
        for state in again:
            flags[state.chunk.index] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.chunks.ranks.reduce)
        return [self.of[i] for i in self.order if flags.tolist()[i]]

    def agree_on_order(self) -> None:
        """After the first step, fix the order of reduction: that in which the first rank's chunks were
        complete.
        """
        order = [i for i in dict.fromkeys(self.done_order) if i in self.of]
        order += [i for i in self.order if i not in order]
        if self.chunks.ranks.size > 1:
            shared = torch.tensor(order, dtype=torch.int64, device=self.meeting)
            broadcast_from_first([shared], self.chunks.ranks.reduce)
            order = shared.tolist()
        self.order = order
        self._agreed = True

    # In the step

    def take_tied(self) -> None:
        """Reduce the gradients of tied weights, which the stages have added up; every rank of the stage calls
        it.
        """
        if not self.tied.slots:
            return
        self.resolve()
        for chunk, slot in self.tied.release():
            self.add(chunk, slot)
        for chunk in dict.fromkeys(self.tied.slots.values()):
            self.of[chunk.index].reduce(sync=True)
            self.of[chunk.index].is_reduced = False
        if self.chunks.ranks.size > 1:
            self._share_used()

    def _share_used(self) -> None:
        """Ask which parameters got a gradient on any rank; ``resolve`` reads the answer."""
        device = self.meeting
        marks = [
            int(slot in state.used or slot in state.untold)
            for state in self.of.values()
            for slot in state.chunk.slots
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
        """Mark the parameters that have a gradient on any rank as used."""
        if self._masks is None:
            return
        flags, copy = self._masks
        if copy.work is not None:
            copy.work.wait()
        copy.finish()
        self._masks = None
        marks = iter(flags.tolist())
        for state in self.of.values():
            state.mark_used([slot for slot in state.chunk.slots if next(marks)])

    @property
    def meeting(self) -> torch.device:
        """The device on which ranks exchange small tensors."""
        return torch.device("cpu") if self.chunks.ranks.staged else self.chunks.device

    # Room

    def evict(self) -> bool:
        """Let the gradients of one chunk leave the compute tier before they are complete; False if there are
        none.
        """
        return self.memory.land() or any(state.evict_buffer() for state in self.of.values())

    def _evict_shard(self) -> bool:
        """Move the gradients of one chunk from the host to the disk: of the last layers, which are updated
        last.
        """
        if self.chunks.shelf is None:
            return False
        return any(self.of[index].evict_shard() for index in sorted(self.of, reverse=True))

    def clear(self) -> None:
        """Drop all gradients."""
        self.tied.clear()
        for state in self.of.values():
            state.clear()
