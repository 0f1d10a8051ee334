"""Accuracy of a classifier whose scores are whole on this rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def calc_acc(logits: Tensor, targets: Tensor) -> Tensor:
    """How many rows of ``logits`` have their largest score at the class in ``targets``."""
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"accuracy needs scores of shape (*targets, classes); got scores {tuple(logits.shape)} for targets"
            f" {tuple(targets.shape)}"
        )
    return (logits.argmax(dim=-1) == targets).sum()


class Accuracy(nn.Module):
    """The number of correct predictions in a batch; the trainer divides by the number of labels."""

    @torch.no_grad()
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return calc_acc(logits, targets)
