"""Which states an optimizer keeps of a piece, known before it has made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.nn.optimizer.base import HALVES, MultiTensorOptimizer, wide
from colossalai.zero.gemini.second import options_of, second_hold
from colossalai.zero.pieces import Piece, is_elementwise

Fields = tuple[tuple[str, torch.dtype], ...]
MASTER = "master"


def is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


class Kinds:
    """The states of ``optim`` that have a number for each element of a parameter."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self._groups = {id(p): n for n, group in enumerate(optim.param_groups) for p in group["params"]}
        self._probed: dict[tuple[int, torch.dtype], Fields] = {}

    def of(self, piece: Piece) -> Fields:
        """Names and dtypes; empty where states are no such thing."""
        value, optim = piece.value, self.optim
        known = {n: v for n, v in optim.state.get(value, {}).items() if is_large(v)}
        number = self._groups[id(value)]
        if not isinstance(optim, MultiTensorOptimizer):
            if not is_elementwise(optim):
                return ()
            if known or optim.state.get(
                value
            ):  # of a weight without dims, states that were made are not large
                return tuple((n, v.dtype) for n, v in known.items())
            return self._probe(number, value.dtype)
        found = [(name, wide(value)) for name in optim.state_names(optim.param_groups[number])]
        if value.dtype in HALVES:
            extra = MASTER if MASTER in known else optim.extra(value)
            found.append((extra, torch.int16 if extra == "tail" else torch.float32))
        return tuple(found)

    def nbytes(self, piece: Piece) -> int:
        """Bytes of the states of ``piece``; of an optimizer that is not ours, what Adam has."""
        if not isinstance(self.optim, MultiTensorOptimizer):
            return piece.value.numel() * 2 * piece.value.dtype.itemsize
        return piece.value.numel() * sum(dtype.itemsize for _, dtype in self.of(piece))

    def sort(self, pieces: Iterable[Piece]) -> dict[Fields, list[Piece]]:
        """The pieces that have such states, by their kinds."""
        found: dict[Fields, list[Piece]] = {}
        for piece in pieces:
            if fields := self.of(piece):
                found.setdefault(fields, []).append(piece)
        return found

    def splits(self, value: Tensor) -> bool:
        """Whether the optimizer keeps only the digits that the parameter lacks, and no master."""
        return (
            isinstance(self.optim, MultiTensorOptimizer)
            and value.dtype in HALVES
            and self.optim.extra(value) == "tail"
        )

    def with_tail(self, fields: Fields) -> Fields:
        return tuple(("tail", torch.int16) if name == MASTER else (name, dtype) for name, dtype in fields)

    def _probe(self, number: int, dtype: torch.dtype) -> Fields:
        """What the optimizer makes for a parameter of one element."""
        if (number, dtype) not in self._probed:
            dummy = nn.Parameter(torch.zeros(1, dtype=dtype))
            dummy.grad = torch.zeros(1, dtype=dtype)
            hold: Any = second_hold(self.optim)
            hold.param_groups = [{**options_of(self.optim)[number], "params": [dummy]}]
            hold.step()
            made = hold.state[dummy].items()
            self._probed[number, dtype] = tuple((name, v.dtype) for name, v in made if is_large(v))
        return self._probed[number, dtype]
