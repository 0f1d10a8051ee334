"""Losses."""

from colossalai.nn.loss.cross_entropy import (
    CrossEntropyLoss,
    CrossEntropyLoss2D,
    CrossEntropyLoss2p5D,
    CrossEntropyLoss3D,
    VocabParallelCrossEntropyLoss1D,
    VocabParallelCrossEntropyLoss2D,
    VocabParallelCrossEntropyLoss2p5D,
    VocabParallelCrossEntropyLoss3D,
    vocab_parallel_cross_entropy,
)
from colossalai.nn.loss.moe_loss import MoeCrossEntropyLoss, MoeLoss

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyLoss2D",
    "CrossEntropyLoss2p5D",
    "CrossEntropyLoss3D",
    "MoeCrossEntropyLoss",
    "MoeLoss",
    "VocabParallelCrossEntropyLoss1D",
    "VocabParallelCrossEntropyLoss2D",
    "VocabParallelCrossEntropyLoss2p5D",
    "VocabParallelCrossEntropyLoss3D",
    "vocab_parallel_cross_entropy",
]
