"""The older name of the service: engines for any model, with the names and arguments of older scripts.

What they stand for lives in ``colossalai.serving``; models are in ``energonai.model``.
"""

from colossalai.serving import (
    AsyncEngine,
    BatchManager,
    BatchManagerForGeneration,
    ListCache,
    MissCacheError,
    QueueFullError,
    SubmitEntry,
    TaskEntry,
    launch_engine,
)
from energonai.engine import Executor, InferenceEngine

__all__ = [
    "AsyncEngine",
    "BatchManager",
    "BatchManagerForGeneration",
    "Executor",
    "InferenceEngine",
    "ListCache",
    "MissCacheError",
    "QueueFullError",
    "SubmitEntry",
    "TaskEntry",
    "launch_engine",
]
