"""Vectors to logits: over the vocabulary, or over the classes of an image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.mesh import full_shape
from colossalai.nn import first_token, to_hidden
from colossalai.nn.modes import current
from colossalai.nn.sequence import current_sequence
from titans.layer.basic import classifier, layer_norm, linear


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


class BertLMHead(nn.Module):
    """A dense layer with its activation and layer norm, then one logit per word."""

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        weight: nn.Parameter | None = None,
        activation: Callable[[Tensor], Tensor] = gelu,
        layernorm_epsilon: float = 1e-12,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.place, self.activation = current(), activation
        self.transform = linear(dim, dim, role="expand", dtype=dtype)
        self.norm = layer_norm(dim, eps=layernorm_epsilon, dtype=dtype)
        self.dense = classifier(dim, vocab_size, weight=weight, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = to_hidden(self.activation(self.transform(x)), self.place)
        return self.dense(self.norm(x))  # (batch, seq, vocab)


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
        self.place, self.sequence = current(), current_sequence()
        inner = representation_size or dim
        self.representation = (
            linear(dim, inner, role="expand", bias=bias, dtype=dtype) if representation_size else None
        )
        self.dense = classifier(inner, num_classes, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = first_token(x, self.place, self.sequence)  # (batch, hidden)
        if self.representation is not None:
            x = to_hidden(torch.tanh(self.representation(x)), self.place)
        return self.dense(x)  # (batch, classes)
