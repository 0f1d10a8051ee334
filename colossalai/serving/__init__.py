"""The service: a model behind ranks that are watched, and HTTP in front of it.

``Service`` is the core: requests go to ranks, answers come back, and a rank that dies or hangs fails what is
pending with its reason before the ranks are started anew.  ``TextModel`` gives it texts and coroutines,
``colossalai.serving.http`` (with the extra ``serve``) routes and a page, ``launch_engine`` the engine of the
documents.
"""

from colossalai.serving.batching import BatchManager, BatchManagerForGeneration, SubmitEntry, TaskEntry
from colossalai.serving.engine import AsyncEngine, launch_engine
from colossalai.serving.errors import QueueFullError, ServiceError, StartError
from colossalai.serving.front import RequestError, TextModel
from colossalai.serving.generation import Generation
from colossalai.serving.list_cache import ListCache, MissCacheError
from colossalai.serving.service import Answer, Service
from colossalai.serving.worker import Job

__all__ = [
    "Answer",
    "AsyncEngine",
    "BatchManager",
    "BatchManagerForGeneration",
    "Generation",
    "Job",
    "ListCache",
    "MissCacheError",
    "QueueFullError",
    "RequestError",
    "Service",
    "ServiceError",
    "StartError",
    "SubmitEntry",
    "TaskEntry",
    "TextModel",
    "launch_engine",
]
