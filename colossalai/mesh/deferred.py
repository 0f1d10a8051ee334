"""The older place of ``Deferred``; it lives in ``colossalai.mesh.weights.deferred``."""

from colossalai.mesh.weights.deferred import Deferred, materialize

__all__ = ["Deferred", "materialize"]
