"""Promotion: chunks move to the compute device, with their gradients and states, when it is known what the
activations leave free: before the first update, so that states are made there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_gradients import IN_FLIGHT
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.optimizer_states import ChunkPieces, StateBytes, is_large
from colossalai.zero.gemini.shadow_optimizer import ShadowOptimizer
from colossalai.zero.gemini.tiers import UNLIMITED, Tier
from colossalai.zero.pieces import Piece


class Promotion:
    """Moves chunks of ``model`` to the compute tier; ``margin`` is the share of what is free that they get
    (``auto``: all of it).
    """

    def __init__(
        self,
        model: ZeroDDP,
        chunk_pieces: ChunkPieces,
        shadow: ShadowOptimizer,
        state_bytes: StateBytes,
        margin: float,
    ) -> None:
        self.model, self.chunks, self.manager = model, model.chunk_manager, model.gemini_manager
        self.chunk_pieces, self.shadow, self.state_bytes = chunk_pieces, shadow, state_bytes
        self.margin = margin
        self._expected: dict[int, int] = {}

    def promote(self) -> None:
        """Move as many chunks as fit to the compute device."""
        share = 1.0 if self.manager.policy.measures else self.margin
        if not share or self.manager.policy.rests_on_compute:
            return
        self.manager.worker.wait_all()
        self._expected = self.state_bytes.expected()
        budget = self._budget(share)
        order = sorted(
            (
                c
                for c in self.chunks.chunks
                if c.home is self.chunks.host and c.index not in self.state_bytes.on_disk
            ),
            key=lambda c: (self.manager.trace.first_use(c.index), c.index),
        )
        others = sum(c.home is not self.chunks.compute for c in self.chunks.chunks) - len(order)
        # ranks that share chunks gather them wherever they rest; one rank gathers those that find no room
        if self.chunks.ranks.size > 1 or others or sum(map(self._cost, order)) > budget:
            budget -= self._window()
        moved = False
        for chunk in order:
            if self._cost(chunk) > budget:
                break
            budget -= self._cost(chunk)
            self.move(chunk, self.chunks.compute)
            moved = True
        if moved:
            self.model._hooks.refresh()

    def _cost(self, chunk: Chunk) -> int:
        """Return the bytes that ``chunk`` takes of the compute tier when it rests there: weights, gradients,
        all states.
        """
        states = max(self.state_bytes.of(chunk), self._expected[chunk.index])
        return chunk.shard_nbytes * (2 if chunk.trained else 1) + states

    def _window(self) -> int:
        """Return the bytes for chunks that come and go, and for gradients on their way."""
        largest = max(c.nbytes for c in self.chunks.chunks)
        return (self.manager.prefetch + 2 + IN_FLIGHT + 1) * largest

    def _budget(self, share: float) -> int:
        budget = int(self.manager.cuda_margin_mem * share)
        if self.chunks.ranks.size > 1:  # ranks gather the same chunks
            budget = min(budget, UNLIMITED)
            number = torch.tensor([budget], dtype=torch.int64, device=self.model.gradients.meeting)
            dist.all_reduce(number, op=dist.ReduceOp.MIN, group=self.chunks.ranks.reduce)
            budget = int(number.item())
        return budget

    @torch.no_grad()
    def move(self, chunk: Chunk, tier: Tier) -> None:
        """Move ``chunk`` to ``tier``, with its gradients and states."""
        old = chunk.home
        assert old is not None
        states = self.state_bytes.of(chunk)
        self.manager.mark_stale(chunk)
        self.chunks.give_home(chunk, tier)
        tier.reserve(states, f"optimizer states of {chunk.name}")
        old.release(states)
        if chunk.index in self.model.gradients.of:
            self.model.gradients.of[chunk.index].move_shard(tier)
        for _, piece, _ in self.chunk_pieces.of(chunk):
            self._follow(piece, chunk, tier)

    def _follow(self, piece: Piece, chunk: Chunk, tier: Tier) -> None:
        optim = self.shadow.optim
        shared, known = piece.is_shared, self.shadow.master_is_current(piece)
        self.shadow.forget(piece)
        piece.weight = piece.in_shard(chunk.shard) if not piece.is_empty else chunk.shard[:0]
        piece.value.data = piece.weight if shared else piece.value.data.to(tier.device)
        state = optim.state.get(piece.value, {})
        for name, value in state.items():
            if is_large(value):
                state[name] = value.to(tier.device)
        if known and isinstance(optim, MultiTensorOptimizer):
            optim.versions[piece.value] = piece.value._version
