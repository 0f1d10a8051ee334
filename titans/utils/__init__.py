"""Helpers for scripts that train the models of this package."""

from titans.utils.context import barrier_context
from titans.utils.generation import generate

__all__ = ["barrier_context", "generate"]
