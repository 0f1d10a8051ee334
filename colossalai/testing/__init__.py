"""Helpers for tests of distributed code."""

from colossalai.testing._spawn import RankError, spawn

__all__ = ["RankError", "spawn"]
