"""The older documented place of ``LazyInitContext``."""

from colossalai.utils.model.experimental import LazyInitContext

__all__ = ["LazyInitContext"]
