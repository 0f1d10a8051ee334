"""Optimizer steps on many tensors at once, each with a fast way where there is one and plain PyTorch
everywhere.

Nothing is compiled, and Triton is not imported, before a kernel is used.
"""

from colossalai.kernel.table import implementations

__all__ = ["implementations"]
