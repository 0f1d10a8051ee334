"""How many bytes the optimizer states of every chunk take at its home; the disk counts its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from colossalai.utils.away import is_away
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.resting import Resting
from colossalai.zero.gemini.state_kinds import Kinds, is_large
from colossalai.zero.gemini.stepping import Members


class Accounts:
    """States of ``optim`` that lie in the memory of a tier, by chunk."""

    def __init__(self, model: ZeroDDP, optim: Optimizer, members: Members, resting: Resting | None) -> None:
        self.model, self.chunks = model, model.chunk_manager
        self.optim, self.members, self.resting = optim, members, resting
        self.away: set[int] = (
            set()
        )  # chunks of which something rests on a disk, on some rank: they do not move
        self._counted: dict[int, int] = {}
        self._kinds = Kinds(optim)

    def of(self, chunk: Chunk) -> int:
        """What has been counted."""
        return self._counted.get(chunk.index, 0)

    def room(self) -> int:
        """Bytes of the host that nobody else will need."""
        return self.chunks.host_room() - self.model.gradients.host.missing_bytes

    def count(self, chunk: Chunk, coming: int = 0) -> None:
        """Count the states of ``chunk``, and those that are ``coming``, if there are more than before."""
        now = self._bytes(chunk) + coming
        if now > self.of(chunk):
            self._set(chunk, now)

    def forget(self, chunk: Chunk) -> None:
        """The states of ``chunk`` are replaced by others."""
        assert chunk.home is not None
        chunk.home.give(self._counted.pop(chunk.index, 0))

    def expected(self) -> dict[int, int]:
        """Bytes of the states of every chunk when all of them have been made, the same on all ranks: the most of any."""
        chunks = self.chunks.chunks
        found = self._most([self._expected_of(chunk) for chunk in chunks])
        return {chunk.index: nbytes for chunk, nbytes in zip(chunks, found, strict=True)}

    def coming(self, chunk: Chunk) -> int:
        """Bytes of states of ``chunk`` that have not been made yet."""
        return max(self._expected_of(chunk) - self.of(chunk), 0)

    def _expected_of(self, chunk: Chunk) -> int:
        pieces = self.members.pieces(chunk)
        masters = sum(piece.value.nbytes for piece in pieces if not piece.is_shared)
        return masters + sum(map(self._kinds.nbytes, pieces))

    def agree(self) -> None:
        """Count the same on all ranks, the most of any: what is brought and let go must not differ."""
        every, resting = self.chunks.chunks, self.resting
        if resting is None and self.chunks.ranks.size == 1:
            return
        self.model.gemini_manager.worker.wait_all()
        if resting is not None:
            flags = self._most([int(resting.has(chunk)) for chunk in every])
            self.away = {chunk.index for chunk, flag in zip(every, flags, strict=True) if flag}
        for chunk, most in zip(every, self._most([self.of(chunk) for chunk in every]), strict=True):
            if resting is None or not resting.has(chunk):
                self._set(chunk, most)

    def _set(self, chunk: Chunk, nbytes: int) -> None:
        assert chunk.home is not None
        chunk.home.take(nbytes - self.of(chunk), f"optimizer states of {chunk.name}")
        self._counted[chunk.index] = nbytes

    def _most(self, numbers: list[int]) -> list[int]:
        if self.chunks.ranks.size == 1:
            return numbers
        most = torch.tensor(numbers, dtype=torch.int64, device=self.model.gradients.meeting)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.chunks.ranks.reduce)
        return most.tolist()

    def _bytes(self, chunk: Chunk) -> int:
        total = 0
        for _, piece, _ in self.members.of(chunk):
            state = self.optim.state.get(piece.value, {})
            total += sum(t.nbytes for t in state.values() if is_large(t) and not is_away(t))
            if not piece.is_shared:
                total += piece.value.nbytes
        return total
