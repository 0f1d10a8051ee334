"""Weights that rest in host memory."""

from colossalai.auto_parallel.offload.mem_optimize import memory_optimize

__all__ = ["memory_optimize"]
