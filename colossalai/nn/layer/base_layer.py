"""The documented place of ``ParallelLayer``."""

from colossalai.nn.layer.base import ParallelLayer

__all__ = ["ParallelLayer"]
