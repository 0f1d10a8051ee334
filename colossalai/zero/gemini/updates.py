"""Updates of chunks that rest on the host or on the disk: jobs on the worker's thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.kernel.kept import Kept
from colossalai.kernel.lists import row
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.zero.gemini.accounts import Accounts
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.grad_buffers import Taken
from colossalai.zero.gemini.resting import Part, Resting, small_of
from colossalai.zero.gemini.second import Options, Second
from colossalai.zero.gemini.state_kinds import Kinds
from colossalai.zero.gemini.stepping import Member, Members, like
from colossalai.zero.gemini.worker import nothing
from colossalai.zero.pieces import Piece


class Updates:
    """Gives updates of chunks to the worker, in the order in which the next forward pass will need them."""

    def __init__(
        self,
        model: ZeroDDP,
        optim: Optimizer,
        members: Members,
        second: Second,
        resting: Resting | None,
        accounts: Accounts,
    ) -> None:
        self.model, self.manager = model, model.gemini_manager
        self.optim, self.members, self.second = optim, members, second
        self.resting, self.accounts = resting, accounts
        self._kinds = Kinds(optim)
        self._is_ours = isinstance(optim, MultiTensorOptimizer)

    def submit(self, chunk: Chunk, options: Options, factor: float) -> None:
        """Update ``chunk`` with the gradients that it has now, multiplied by ``factor``."""
        taken = self.model.gradients.take(chunk)
        assert taken is not None
        self.manager.mark_stale(chunk)
        work = partial(self.run, chunk, taken, options, factor)
        priority = self.manager.trace.first_use(chunk.index)
        prepare = partial(self.resting.prepare, chunk) if self.resting is not None else nothing
        self.manager.worker.submit(chunk.index, priority, chunk.name, work, taken.is_here, prepare)

    @torch.no_grad()
    def run(self, chunk: Chunk, taken: Taken, options: Options, factor: float) -> None:
        """The job."""
        shard = self.model.gradients.sum_up(chunk, taken)
        self.apply(chunk, shard, taken.used, options, factor)
        self.model.gradients.put(shard)

    def stepped(self, chunk: Chunk, used: Collection[Slot]) -> list[Piece]:
        """The pieces that an update changes if ``used`` have gradients."""
        return [member.piece for member in self._used_members(chunk, used)]

    @torch.no_grad()
    def apply(
        self,
        chunk: Chunk,
        shard: Tensor,
        used: Collection[Slot],
        options: Options,
        factor: float,
        kept: Kept | None = None,
    ) -> None:
        """Update ``chunk`` now; ``shard`` has the gradients of ``used``.  What was before goes to ``kept``."""
        self.manager.timeline.note("update", chunk)
        self._apply(chunk, shard, self._used_members(chunk, used), options, factor, kept)
        self.accounts.count(chunk)
        self.manager.timeline.note("updated", chunk)

    def _used_members(self, chunk: Chunk, used: Collection[Slot]) -> list[Member]:
        return [m for m in self.members.of(chunk) if m.slot in used and not m.piece.is_empty]

    def _apply(
        self,
        chunk: Chunk,
        shard: Tensor,
        members: Sequence[Member],
        options: Options,
        factor: float,
        kept: Kept | None,
    ) -> None:
        grads = {m.piece: like(m.piece.in_shard(shard), m.piece) for m in members}
        resting = self.resting
        if resting is None:
            self._in_memory(chunk, members, grads, options, factor, kept)
        else:
            assert kept is None
            resting.place(chunk, list(grads), self.accounts.room())
            weights = resting.bring(chunk)
            ordinary = [m for m in members if not resting.has_states(m.piece)]
            self._in_memory(chunk, ordinary, grads, options, factor)
            _AtRest(self, resting, members, grads, options, factor).run()
            resting.put(chunk, weights)

    def _in_memory(
        self,
        chunk: Chunk,
        members: Sequence[Member],
        grads: dict[Piece, Tensor],
        options: Options,
        factor: float,
        kept: Kept | None = None,
    ) -> None:
        if not members:
            return
        missing = [m.piece for m in members if not self.optim.state.get(m.piece.value)]
        self.accounts.count(chunk, sum(map(self._kinds.nbytes, missing)) if self._is_ours else 0)
        twins = [(m.group, self.second.with_states(m.piece)) for m in members]
        for member, (_, twin) in zip(members, twins, strict=True):
            twin.grad = grads[member.piece]
        self.second.step(twins, options, factor, kept)
        for member, (_, twin) in zip(members, twins, strict=True):
            twin.grad = None
            if not member.piece.is_shared:
                member.piece.weight.copy_(member.piece.value)


class _AtRest:
    """One update of pieces whose states pass by in slots: what comes of a piece is stepped as a parameter of its own."""

    def __init__(
        self,
        updates: Updates,
        resting: Resting,
        members: Sequence[Member],
        grads: dict[Piece, Tensor],
        options: Options,
        factor: float,
    ) -> None:
        self.resting, self.second, self.grads = resting, updates.second, grads
        self.options, self.factor = options, factor
        self.groups = {m.piece: m.group for m in members if resting.has_states(m.piece)}
        self.before = {p: small_of(updates.optim.state.get(p.value, {})) for p in self.groups}
        self.after: dict[Piece, dict[str, Any]] = {}
        self.followed = {p for p in self.groups if self.second.is_followed(p)}
        # an optimizer of somebody else makes its states itself
        ours = updates._is_ours
        self.made = {p for p in self.groups if ours or updates.optim.state.get(p.value)}

    def run(self) -> None:
        if not self.groups:
            return
        self.resting.run(list(self.groups), self._step)
        for piece in self.groups:
            self.second.follows(self.second.twin(piece))
            self.resting.rest(piece, self.after[piece])

    def _step(self, parts: list[Part]) -> None:
        twins = [(self.groups[part.piece], self._twin(part)) for part in parts]
        self.second.step_part(twins, self.options, self.factor)
        for part, (_, twin) in zip(parts, twins, strict=True):
            state = self.second.state.pop(twin)
            for name, view in part.states.items():
                value = row(state.pop(name))
                if value.data_ptr() != view.data_ptr():
                    view.copy_(value)
            self.after[part.piece] = state

    def _twin(self, part: Part) -> nn.Parameter:
        piece, extent = part.piece, part.extent
        twin = nn.Parameter(extent.of(row(piece.value.detach())).view(part.shape))
        twin.grad = extent.of(row(self.grads[piece])).view(part.shape)
        views = {n: s.view(part.shape) for n, s in part.states.items()} if piece in self.made else {}
        self.second.state[twin] = {**small_of(self.before[piece]), **views}
        if part.is_in_line or piece in self.followed:
            self.second.follows(twin)
        return twin
