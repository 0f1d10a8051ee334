"""The older documented place of ``LazyInitContext``, and of the class of tensors without memory."""

from colossalai.lazy import LazyInitContext
from colossalai.mesh.weights.unfilled import Unfilled as LazyTensor

__all__ = ["LazyInitContext", "LazyTensor"]
