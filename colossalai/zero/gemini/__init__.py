"""Gemini: ZeRO-3 with chunks over memory tiers."""

from colossalai.zero.gemini.chunk import Chunk, ChunkFullError
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.ddp import GeminiDDP, ZeroDDP
from colossalai.zero.gemini.init_chunks import init_chunk_manager
from colossalai.zero.gemini.manager import GeminiManager
from colossalai.zero.gemini.memory import MemStats, MemStatsCollector
from colossalai.zero.gemini.memory_tracer import (
    AsyncMemoryMonitor,
    ChunkMemStatsCollector,
    RuntimeMemTracer,
    SyncCudaMemoryMonitor,
)
from colossalai.zero.gemini.optimizer import GeminiAdamOptimizer, GeminiOptimizer, ZeroOptimizer
from colossalai.zero.gemini.placement import (
    AutoPlacementPolicy,
    ConstPlacementPolicy,
    CPUPlacementPolicy,
    CUDAPlacementPolicy,
    PlacementPolicyFactory,
)
from colossalai.zero.gemini.search import classify_params_by_dp_degree, search_chunk_configuration
from colossalai.zero.gemini.states import STATE_TRANS, TensorState
from colossalai.zero.gemini.static_model import get_static_torch_model
from colossalai.zero.gemini.tiers import OutOfCapacity, Tier

__all__ = [
    "STATE_TRANS",
    "AsyncMemoryMonitor",
    "AutoPlacementPolicy",
    "CPUPlacementPolicy",
    "CUDAPlacementPolicy",
    "Chunk",
    "ChunkFullError",
    "ChunkManager",
    "ChunkMemStatsCollector",
    "ConstPlacementPolicy",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiManager",
    "GeminiOptimizer",
    "MemStats",
    "MemStatsCollector",
    "OutOfCapacity",
    "PlacementPolicyFactory",
    "RuntimeMemTracer",
    "SyncCudaMemoryMonitor",
    "TensorState",
    "Tier",
    "ZeroDDP",
    "ZeroOptimizer",
    "classify_params_by_dp_degree",
    "get_static_torch_model",
    "init_chunk_manager",
    "search_chunk_configuration",
]
