"""The documented place of ``ChunkManager`` and ``GeminiManager``; they live in ``colossalai.zero.gemini``."""

from colossalai.zero.gemini import ChunkManager, GeminiManager, TensorState, search_chunk_configuration

__all__ = ["ChunkManager", "GeminiManager", "TensorState", "search_chunk_configuration"]
