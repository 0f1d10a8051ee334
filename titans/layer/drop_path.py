"""Stochastic depth: in training, a sample sometimes passes a residual branch by."""

from __future__ import annotations

from torch import Tensor, nn


class DropPath(nn.Module):
    """Zero a whole sample with probability ``rate`` and scale the others by ``1 / (1 - rate)``; nothing in eval mode."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path must be at least 0 and less than 1, got {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
