"""Updates of chunks that rest on the host or on the disk: jobs of the update worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.kernel.optimizer.lists import row
from colossalai.kernel.optimizer.snapshot import TensorSnapshot
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.zero.gemini.chunk import Chunk, ParamSlot
from colossalai.zero.gemini.chunk_gradients import PendingGradients
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.disk_states import DiskStates, StatePart, small_of
from colossalai.zero.gemini.optimizer_states import ChunkPiece, ChunkPieces, StateBytes, StateKinds, like
from colossalai.zero.gemini.shadow_optimizer import Options, ShadowOptimizer
from colossalai.zero.gemini.update_worker import nothing
from colossalai.zero.pieces import Piece


class HostUpdates:
    """Submits updates of chunks to the worker, in the order in which the next forward pass will need them."""

    def __init__(
        self,
        model: ZeroDDP,
        optim: Optimizer,
        chunk_pieces: ChunkPieces,
        shadow: ShadowOptimizer,
        disk: DiskStates | None,
        state_bytes: StateBytes,
    ) -> None:
        self.model, self.manager = model, model.gemini_manager
        self.optim, self.chunk_pieces, self.shadow = optim, chunk_pieces, shadow
        self.disk, self.state_bytes = disk, state_bytes
        self._kinds = StateKinds(optim)
        self._is_ours = isinstance(optim, MultiTensorOptimizer)

    def submit(self, chunk: Chunk, options: Options, factor: float) -> None:
        """Update ``chunk`` with the gradients that it has now, multiplied by ``factor``."""
        taken = self.model.gradients.of[chunk.index].release()
        assert taken is not None
        self.manager.mark_stale(chunk)
        work = partial(self.run, chunk, taken, options, factor)
        priority = self.manager.trace.first_use(chunk.index)
        prepare = partial(self.disk.prepare, chunk) if self.disk is not None else nothing
        self.manager.worker.submit(chunk.index, priority, chunk.name, work, taken.has_arrived, prepare)

    @torch.no_grad()
    def run(self, chunk: Chunk, taken: PendingGradients, options: Options, factor: float) -> None:
        """Sum up the gradients and update ``chunk``; the job of the worker."""
        memory = self.model.gradients.memory
        shard = taken.sum_up(memory)
        self.apply(chunk, shard, taken.used, options, factor)
        memory.put(shard)

    def stepped(self, chunk: Chunk, used: Collection[ParamSlot]) -> list[Piece]:
        """Return the pieces that an update changes if ``used`` have gradients."""
        return [member.piece for member in self._used_pieces(chunk, used)]

    @torch.no_grad()
    def apply(
        self,
        chunk: Chunk,
        shard: Tensor,
        used: Collection[ParamSlot],
        options: Options,
        factor: float,
        kept: TensorSnapshot | None = None,
    ) -> None:
        """Update ``chunk`` now; ``shard`` has the gradients of ``used``, ``kept`` takes a snapshot."""
        self.manager.timeline.note("update", chunk)
        self._apply(chunk, shard, self._used_pieces(chunk, used), options, factor, kept)
        self.state_bytes.count(chunk)
        self.manager.timeline.note("updated", chunk)

    def _used_pieces(self, chunk: Chunk, used: Collection[ParamSlot]) -> list[ChunkPiece]:
        return [m for m in self.chunk_pieces.of(chunk) if m.slot in used and not m.piece.is_empty]

    def _apply(
        self,
        chunk: Chunk,
        shard: Tensor,
        chunk_pieces: Sequence[ChunkPiece],
        options: Options,
        factor: float,
        kept: TensorSnapshot | None,
    ) -> None:
        grads = {m.piece: like(m.piece.in_shard(shard), m.piece) for m in chunk_pieces}
        disk = self.disk
        if disk is None:
            self._in_memory(chunk, chunk_pieces, grads, options, factor, kept)
        else:
            assert kept is None
            disk.place(chunk, list(grads), self.state_bytes.room())
            weights = disk.read_weights(chunk)
            ordinary = [m for m in chunk_pieces if not disk.has_states(m.piece)]
            self._in_memory(chunk, ordinary, grads, options, factor)
            _DiskUpdate(self, disk, chunk_pieces, grads, options, factor).run()
            disk.write_weights(chunk, weights)

    def _in_memory(
        self,
        chunk: Chunk,
        chunk_pieces: Sequence[ChunkPiece],
        grads: dict[Piece, Tensor],
        options: Options,
        factor: float,
        kept: TensorSnapshot | None = None,
    ) -> None:
        if not chunk_pieces:
            return
        missing = [m.piece for m in chunk_pieces if not self.optim.state.get(m.piece.value)]
        self.state_bytes.count(chunk, sum(map(self._kinds.nbytes, missing)) if self._is_ours else 0)
        shadows = [(m.group, self.shadow.with_states(m.piece)) for m in chunk_pieces]
        for member, (_, shadow) in zip(chunk_pieces, shadows, strict=True):
            shadow.grad = grads[member.piece]
        self.shadow.step(shadows, options, factor, kept)
        for member, (_, shadow) in zip(chunk_pieces, shadows, strict=True):
            shadow.grad = None
            if not member.piece.is_shared:
                member.piece.weight.copy_(member.piece.value)


class _DiskUpdate:
    """One update of pieces whose states are on the disk: each part that comes in a slot is stepped as a
    parameter.
    """

    def __init__(
        self,
        updates: HostUpdates,
        disk: DiskStates,
        chunk_pieces: Sequence[ChunkPiece],
        grads: dict[Piece, Tensor],
        options: Options,
        factor: float,
    ) -> None:
        self.disk, self.shadow, self.grads = disk, updates.shadow, grads
        self.options, self.factor = options, factor
        self.groups = {m.piece: m.group for m in chunk_pieces if disk.has_states(m.piece)}
        self.before = {p: small_of(updates.optim.state.get(p.value, {})) for p in self.groups}
        self.after: dict[Piece, dict[str, Any]] = {}
        self.current = {p for p in self.groups if self.shadow.master_is_current(p)}
        # an optimizer that is not ours makes its states itself
        ours = updates._is_ours
        self.made = {p for p in self.groups if ours or updates.optim.state.get(p.value)}

    def run(self) -> None:
        if not self.groups:
            return
        self.disk.run(list(self.groups), self._step)
        for piece in self.groups:
            self.shadow.mark_current(self.shadow.param(piece))
            self.disk.show_states(piece, self.after[piece])

    def _step(self, parts: list[StatePart]) -> None:
        shadows = [(self.groups[part.piece], self._shadow_of(part)) for part in parts]
        self.shadow.step_part(shadows, self.options, self.factor)
        for part, (_, shadow) in zip(parts, shadows, strict=True):
            state = self.shadow.state.pop(shadow)
            for name, view in part.states.items():
                value = row(state.pop(name))
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
            self.after[part.piece] = state

    def _shadow_of(self, part: StatePart) -> nn.Parameter:
        piece, extent = part.piece, part.extent
        shadow = nn.Parameter(extent.of(row(piece.value.detach())).view(part.shape))
        shadow.grad = extent.of(row(self.grads[piece])).view(part.shape)
        views = {n: s.view(part.shape) for n, s in part.states.items()} if piece in self.made else {}
        self.shadow.state[shadow] = {**small_of(self.before[piece]), **views}
        if part.is_in_line or piece in self.current:
            self.shadow.mark_current(shadow)
        return shadow
