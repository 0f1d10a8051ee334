"""What the tests of this folder share: a small problem, and the lines that mixed precision logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossalai.logging import get_dist_logger


def mlp(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Linear(16, 3))


def batch(seed: int = 0, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of ``colossalai.amp`` within this context."""
    get_dist_logger("colossalai.amp")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("colossalai.amp")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
