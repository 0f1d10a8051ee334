"""Whole tensors from the pieces of all ranks, one at a time, on the first rank: for files that others read.

Our own checkpoints never need this; files in the layout of Hugging Face, and files of one piece, hold whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from colossalai.checkpoint_io.boxes import Box, whole
from colossalai.checkpoint_io.entries import Entry, Piece, fill, whole_piece
from colossalai.checkpoint_io.ranks import Ranks
from colossalai.checkpoint_io.sharding import MB, plan_shards
from colossalai.checkpoint_io.survey import Logical, describe, survey

Part = tuple[dict[str, Tensor | None], float]


class Gathering:
    """The tensors that all ranks hold together.  Every rank makes one, and asks for the same tensors in the same order."""

    def __init__(self, collect: Callable[[], Sequence[Entry]], ranks: Ranks) -> None:
        self.ranks = ranks
        entries, failure = list[Entry](), None
        try:
            entries = list(collect())
        except Exception as error:
            failure = error
        self.plan = survey(ranks.agree(failure, describe(entries)))
        self._pieces: dict[str, list[Piece]] = {}
        for entry in entries:
            self._pieces.setdefault(self.stored_name(entry.name), []).extend(entry.pieces)
        self._aliases: dict[str, list[str]] = {}
        for alias, name in self.plan.ties.items():
            self._aliases.setdefault(name, []).append(alias)

    def stored_name(self, name: str) -> str:
        return name if name in self.plan.tensors else self.plan.ties[name]

    def whole(self, name: str) -> Tensor | None:
        """All of a tensor on the CPU of the first rank; None on the others, which send what it lacks."""
        logical = self.plan.tensors[name]
        is_first = self.ranks.rank == 0
        room = torch.empty(logical.shape, dtype=logical.dtype) if is_first else None
        for box, holders in sorted(logical.holders.items()):
            source = 0 if 0 in holders else holders[0]
            if room is not None:
                fill(whole_piece(room), box, self._taken(name, box, source, logical))
            elif source == self.ranks.rank:
                self.ranks.send_to_first(self._read(name, box))
        return room

    def _taken(self, name: str, box: Box, source: int, logical: Logical) -> Tensor:
        if source == 0:
            return self._read(name, box)
        return self.ranks.receive(box.sizes, logical.dtype, source)

    def _read(self, name: str, box: Box) -> Tensor:
        return next(p for p in self._pieces[name] if p.box.holds(box)).read_part(box)

    def size(self, name: str) -> float:
        """In MB."""
        logical = self.plan.tensors[name]
        return whole(logical.shape).numel * logical.dtype.itemsize / MB

    def parts(self, max_size: float) -> Iterator[Part]:
        """All tensors in parts of at most ``max_size`` MB, with their sizes; those under several names are in one part."""
        units = [([name, *self._aliases.get(name, [])], self.size(name)) for name in self.plan.tensors]
        for names, size in plan_shards(units, max_size):
            found = {name: self.whole(name) for name in names if name in self.plan.tensors}
            yield {name: found[self.stored_name(name)] for name in names}, size
