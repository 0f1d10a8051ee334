"""Vectors to logits: over the vocabulary, or over the classes of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossalai.mesh import full_shape
from colossalai.nn import first_token, to_hidden
from titans.layer.basic import classifier, linear


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
        if weight is not None and (
            not isinstance(weight, nn.Parameter) or full_shape(weight) != (vocab_size, dim)
        ):
            raise ValueError(
                f"a tied head needs a parameter of shape (vocab_size, dim) = {(vocab_size, dim)}, "
                f"got a {type(weight).__name__} of shape {tuple(full_shape(weight))}"
            )
        self.dense = classifier(dim, vocab_size, weight=weight, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)  # (batch, seq, vocab)


class ViTHead(nn.Module):
    """Logits of the classes from the class token, the first; optionally through a ``tanh`` layer before."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        representation_size: int | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = representation_size or dim
        self.representation = (
            linear(dim, inner, role="expand", bias=bias, dtype=dtype) if representation_size else None
        )
        self.dense = classifier(inner, num_classes, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = first_token(x)  # (batch, hidden)
        if self.representation is not None:
            x = to_hidden(torch.tanh(self.representation(x)))
        return self.dense(x)  # (batch, classes)
