"""Torch functions on ColoTensors; importing this package fills its tables."""

from colossalai.tensor.ops import autograd, forms, methods

__all__ = ["autograd", "forms", "methods"]
