"""Gemini: ZeRO-3 with chunks over memory tiers."""

from colossalai.zero.gemini.chunk import STATE_TRANS, Chunk, ChunkFullError, TensorState
from colossalai.zero.gemini.chunk_manager import ChunkManager, init_chunk_manager
from colossalai.zero.gemini.chunk_search import classify_params_by_dp_degree, search_chunk_configuration
from colossalai.zero.gemini.ddp import GeminiDDP, ZeroDDP, get_static_torch_model
from colossalai.zero.gemini.manager import GeminiManager
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
    MemStats,
    MemStatsCollector,
    PlacementPolicyFactory,
)
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
