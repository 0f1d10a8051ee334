"""A plan leaves no trace in a model, and says so where it cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import auto_checkpoint

ROWS = torch.ones(64, 16)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


class Net(nn.Module):
    """Three blocks of a kind."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Positions:
    """Keeps what it has computed, as rotary embeddings do."""

    def __init__(self) -> None:
        self.calls = 0
        self.scale = torch.ones(16)
        self.table: Tensor | None = None
        self.known: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(16, device=x.device) / 16
            self.known[16] = self.table * 2
        return x * self.scale + self.table + self.known[16]


class WithPositions(Block):
    """Holds an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.positions(x))


def test_objects_of_modules_keep_nothing_of_the_play() -> None:
    model: Any = Net(WithPositions)
    plan = auto_checkpoint(model, ROWS, "10 MiB")
    assert not plan.notes  # it was played on the meta device
    for layer in model.layers:
        positions = layer.positions
        assert positions.calls == 0
        assert positions.table is None
        assert not positions.known
    model(ROWS).sum().backward()
