"""Gradients at the homes of their chunks, where they wait for the update: on the compute tier, on the host, or on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from colossalai.mesh._compat import norms_of
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.grad_buffers import ChunkGradients, HostBuffers, Spilled, Taken
from colossalai.zero.gemini.tiers import Move


class HomeGradients:
    """The averaged gradients of all chunks; ``wait`` waits for a host buffer to come back."""

    def __init__(self, chunks: ChunkManager, wait: Callable[[], bool], host_buffers: int | None) -> None:
        self.chunks = chunks
        self.host = HostBuffers(chunks, host_buffers, wait, self._spill_to_disk)
        self.spilled = Spilled(chunks)
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

    def look(self, chunk: Chunk) -> Taken | None:
        """What ``take`` would hand over, which stays here; None if there is nothing, or something of it on the disk."""
        state = self.of[chunk.index]
        if state.shard is None or state.rows or chunk.home is self.chunks.compute:
            return None
        moves = [state.move, *(move for _, move in state.extra)]
        return Taken(state.shard, moves, [], frozenset(state.used), [])

    def take(self, chunk: Chunk) -> Taken | None:
        """Hand the gradients of a chunk that rests on the host over to its update; None if there are none."""
        state = self.of[chunk.index]
        if not state.is_begun or chunk.home is self.chunks.compute:
            return None
        with self.settling:
            moves = [state.move, *(move for _, move in state.extra)]
            more = [more for more, _ in state.extra]
            taken = Taken(state.shard, moves, more, frozenset(state.used), state.rows)
            state.shard, state.move, state.norms, state.rows, state.parts = None, Move(), None, [], 0
            state.extra.clear()
        state.used.clear()
        return taken

    @torch.no_grad()
    def sum_up(self, chunk: Chunk, taken: Taken) -> Tensor:
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
            shard, state.shard, state.move = state.shard, None, Move()
            state.rows.append(self.spilled.write(chunk, shard))
            self.host.put(shard)
            return True
        return False

    def has_any(self) -> bool:
        return any(s.is_begun or s.direct or s.local is not None for s in self.of.values())

    def piece(self, chunk: Chunk, slot: Slot) -> Tensor | None:
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

    def norm(self, chunk: Chunk, slot: Slot) -> Tensor | None:
        """The norm of ``piece``, if it is known."""
        state = self.of[chunk.index]
        if state.rows and state.norms is None:
            state.norms = self._norms_on_disk(chunk, state)
        return state.norms.get(slot) if state.norms is not None and slot in state.used else None

    def _norms_on_disk(self, chunk: Chunk, state: ChunkGradients) -> dict[Slot, Tensor]:
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
