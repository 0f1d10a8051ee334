"""Softmax of scores times a scale, without the masked ones, as two functions."""

from __future__ import annotations

from torch import Tensor

from colossalai.kernel.scaled_softmax import masked_softmax, softmax_backward


def forward(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Of scores (batch, heads, queries, keys); ``mask`` (1 or batch, 1, queries, keys) is 1 or true where a
    score does not count.
    """
    return masked_softmax(inputs, mask.bool(), scale)


def backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """The gradient of ``inputs``."""
    return softmax_backward(output_grads, softmax_results, scale)
