"""Batches of noise in the shape of images: for the time of a step, not for learning."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class NoiseImages:
    """``steps`` batches of ``batch_size`` images (3, size, size) and labels, the same in every pass.

    Args:
        seed: equal on ranks that hold parts of one model, different on replicas.
    """

    def __init__(self, batch_size: int, size: int, classes: int, seed: int = 0, steps: int = 10) -> None:
        self.batch_size, self.size, self.classes = batch_size, size, classes
        self.seed, self.steps = seed, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            labels = torch.randint(self.classes, (self.batch_size,), generator=generator)
            yield torch.randn(self.batch_size, 3, self.size, self.size, generator=generator), labels
