"""Losses."""

from colossalai.nn.loss.cross_entropy import CrossEntropyLoss, vocab_parallel_cross_entropy
from colossalai.nn.loss.named import (
    CrossEntropyLoss2D,
    CrossEntropyLoss2p5D,
    CrossEntropyLoss3D,
    VocabParallelCrossEntropyLoss1D,
    VocabParallelCrossEntropyLoss2D,
    VocabParallelCrossEntropyLoss2p5D,
    VocabParallelCrossEntropyLoss3D,
)

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyLoss2D",
    "CrossEntropyLoss2p5D",
    "CrossEntropyLoss3D",
    "VocabParallelCrossEntropyLoss1D",
    "VocabParallelCrossEntropyLoss2D",
    "VocabParallelCrossEntropyLoss2p5D",
    "VocabParallelCrossEntropyLoss3D",
    "vocab_parallel_cross_entropy",
]
