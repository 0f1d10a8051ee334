"""Vectors to logits over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titans.layer.basic import linear


class GPTLMHead(nn.Module):
    """One logit per word of the vocabulary.

    With ``weight`` (the word embedding's) the head is tied: both modules hold the same parameter, so a word
    is scored by the vector that also represents it as an input.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        weight: Tensor | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dense = linear(dim, vocab_size, bias=bias, dtype=dtype)
        if weight is not None:
            if not isinstance(weight, nn.Parameter) or weight.shape != (vocab_size, dim):
                raise ValueError(
                    f"a tied head needs a parameter of shape (vocab_size, dim) = {(vocab_size, dim)}, "
                    f"got a {type(weight).__name__} of shape {tuple(weight.shape)}"
                )
            self.dense.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)  # (batch, seq, vocab)
