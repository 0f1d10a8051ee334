"""Losses."""

from colossalai.nn.loss.cross_entropy import CrossEntropyLoss

__all__ = ["CrossEntropyLoss"]
