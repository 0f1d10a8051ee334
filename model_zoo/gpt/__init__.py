"""GPT and its loss."""

from titans.model.gpt import GPT, GPTLMLoss, gpt2_8B, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, gpt3

__all__ = ["GPT", "GPTLMLoss", "gpt2_8B", "gpt2_large", "gpt2_medium", "gpt2_small", "gpt2_xl", "gpt3"]
