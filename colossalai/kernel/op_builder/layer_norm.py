"""Layer normalization as two functions, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def forward_affine(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized input, and what ``backward_affine`` needs: mean and inverse deviation of each row."""
    output, mean, inverse = torch.native_layer_norm(
        input, list(normalized_shape), weight.to(input.dtype), bias.to(input.dtype), eps
    )
    return output.to(weight.dtype), mean, inverse


def backward_affine(
    grad_output: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias; ``eps`` is part of ``invvar`` already."""
    grads = torch.ops.aten.native_layer_norm_backward(
        grad_output.to(input.dtype),
        input,
        list(normalized_shape),
        mean,
        invvar,
        weight.to(input.dtype),
        bias.to(input.dtype),
        [True, True, True],
    )
    return grads[0], grads[1].to(weight.dtype), grads[2].to(bias.dtype)
