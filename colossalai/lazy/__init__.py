"""Models that take no memory when they are built: see ``LazyInitContext``."""

from colossalai.lazy.context import LazyInitContext
from colossalai.mesh.weights.deferred import materialize

__all__ = ["LazyInitContext", "materialize"]
