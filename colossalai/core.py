"""The parallel context of this process: ``from colossalai.core import global_context as gpc``."""

from colossalai.context.parallel_context import global_context

__all__ = ["global_context"]
