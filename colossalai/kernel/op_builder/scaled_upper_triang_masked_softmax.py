"""Causal softmax of scores times a scale, as two functions."""

from __future__ import annotations

from torch import Tensor

from colossalai.kernel.scaled_softmax import future, masked_softmax, softmax_backward


def forward(inputs: Tensor, scale: float) -> Tensor:
    """Of scores (batch times heads, queries, keys); a query sees no key behind it."""
    return masked_softmax(inputs, future(inputs), scale)


def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """The gradient of ``inputs``."""
    return softmax_backward(output_grads, softmax_results, scale)
