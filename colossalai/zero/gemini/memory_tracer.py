"""``RuntimeMemTracer``, which measures a step before training; and the documented place of all that measures
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.utils.memory.monitor import AsyncMemoryMonitor, SyncCudaMemoryMonitor
from colossalai.zero.gemini.ddp import GeminiDDP
from colossalai.zero.gemini.placement import MemStats, MemStatsCollector


class ChunkMemStatsCollector(MemStatsCollector):
    """The documented name of ``MemStatsCollector``, which counts in chunks."""


class StaticMemStatsCollector(ChunkMemStatsCollector):
    """The documented name of a collector that is given ``memstats``, such as those of ``RuntimeMemTracer``,
    and measures nothing more.
    """

    def start_collection(self) -> None:
        """Keep what is known."""

    def finish_collection(self) -> None:
        """Keep what is known."""


class OrderedParamGenerator:
    """The parameters of a model in the order in which a step uses them, each as often as it is used."""

    def __init__(self) -> None:
        self.param_visited_order: list[nn.Parameter] = []

    def append(self, param: nn.Parameter) -> None:
        self.param_visited_order.append(param)

    def generate(self) -> Iterator[nn.Parameter]:
        """Go through the parameters in order, each at its first use."""
        yield from dict.fromkeys(self.param_visited_order)

    def is_empty(self) -> bool:
        return not self.param_visited_order

    def clear(self) -> None:
        self.param_visited_order.clear()


class RuntimeMemTracer(nn.Module):
    """Runs a copy of ``module`` forward and backward, and measures what it needs beside weights, and their
    order of use.

    The copy computes on the current GPU, or the CPU, with one parameter there at a time as far as modules
    allow it; ``module`` stays as it is.  Give ``memstats()`` to ``GeminiDDP``.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.half) -> None:
        super().__init__()
        self._params = dict(module.named_parameters())
        # chunks so small that each takes one parameter
        self.traced = GeminiDDP(
            copy.deepcopy(module), dtype=dtype, prefetch=0, min_chunk_size_mb=0, search_range_mb=0
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.traced(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        self.traced.backward(loss)
        self.traced.zero_grad()

    def memstats(self) -> MemStats:
        self._check_done("memstats")
        return self.traced.gemini_manager.memstats()

    def parameters_in_runtime_order(self) -> list[nn.Parameter]:
        """Return the parameters of ``module`` in the order in which forward and backward pass use them."""
        self._check_done("parameters_in_runtime_order")
        chunks = self.traced.chunk_manager.chunks
        order = self.traced.gemini_manager.trace.order
        return [self._params[slot.name] for index in order for slot in chunks[index].slots]

    def _check_done(self, what: str) -> None:
        if self.traced.gemini_manager.is_warmup():
            raise RuntimeError(
                f"RuntimeMemTracer.{what} is known after a forward and a backward pass: call the tracer, and"
                " its backward(loss)"
            )


__all__ = [
    "AsyncMemoryMonitor",
    "ChunkMemStatsCollector",
    "MemStats",
    "MemStatsCollector",
    "OrderedParamGenerator",
    "RuntimeMemTracer",
    "StaticMemStatsCollector",
    "SyncCudaMemoryMonitor",
]
