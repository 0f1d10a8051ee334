"""The attention of ``colossalai.kernel.MultiHeadAttention``."""

from colossalai.kernel.multi_head_attention import MultiHeadAttention, attention

__all__ = ["MultiHeadAttention", "attention"]
