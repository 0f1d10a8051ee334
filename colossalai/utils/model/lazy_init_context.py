"""The older documented place of ``LazyInitContext``."""

from colossalai.lazy import LazyInitContext

__all__ = ["LazyInitContext"]
