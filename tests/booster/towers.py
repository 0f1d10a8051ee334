"""Models with blocks in a list, of a width that no number of ranks divides, for the tests of plans that cut
weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Tower(nn.Module):
    """Blocks in a list, with a width that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class TiedTower(Tower):
    """Two blocks share a weight with each other, and one with the model; each is used in two units'
    places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(7, 7, bias=False)
        self.blocks[1].inner.weight = self.blocks[0].inner.weight
        self.extra.weight = self.blocks[2].inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.extra(self.blocks[1](self.blocks[0](self.blocks[2](self.first(x))))))


def groups(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay for matrices only, and one group in reverse order."""
    params = list(params)
    matrices = [p for p in params if p.ndim > 1]
    return torch.optim.AdamW(
        [
            {"params": matrices[::-1], "weight_decay": 0.5},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
        eps=1e-4,
    )
