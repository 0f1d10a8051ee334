"""Stochastic depth: in training, a sample sometimes passes a residual branch by."""

from colossalai.nn import DropPath

__all__ = ["DropPath"]
