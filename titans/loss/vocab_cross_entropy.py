"""The cross entropy of a vocabulary-parallel model, under the name that configs use."""

from colossalai.nn import vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy"]
