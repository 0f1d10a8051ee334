"""GPT and the layers that a GPT is built of by hand."""

from titans.layer.attention import GPTSelfAttention
from titans.layer.block import GPTBlock
from titans.layer.embedding import GPTEmbedding
from titans.layer.head import GPTLMHead
from titans.model.gpt import GPT, GPTLMLoss, gpt2_8B, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, gpt3

__all__ = [
    "GPT",
    "GPTBlock",
    "GPTEmbedding",
    "GPTLMHead",
    "GPTLMLoss",
    "GPTSelfAttention",
    "gpt2_8B",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_small",
    "gpt2_xl",
    "gpt3",
]
