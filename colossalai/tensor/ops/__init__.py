"""Torch functions on ColoTensors; importing this package fills the table of ``op_wrapper``."""

from colossalai.tensor.ops import autograd, elementwise, embedding, product, reductions, shape

__all__ = ["autograd", "elementwise", "embedding", "product", "reductions", "shape"]
