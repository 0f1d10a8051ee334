"""The layers with weights that every model here is made of, drawn as GPT-2 draws them.

All other modules build their layers through these functions, so this file alone decides which class a
``Linear`` is: what a layer stores, how it is cut over devices and how its initial values are drawn are
questions of this file, and a model file never asks them.

GPT-2 draws every weight from a normal distribution of standard deviation 0.02 and starts biases at zero.
The two projections of a block that write into the residual stream are drawn narrower, by
``1 / sqrt(number of such projections in the model)``: their outputs are summed, and the sum of ``2 * depth``
independent terms would otherwise grow with the depth.

The weights also carry their distribution (``init``), so that ``colossalai.mesh.initialize`` draws them in pieces, on any
plan, with the values the serial model gets from it.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from colossalai.mesh import Constant, Normal, ZeroRow, set_init

INIT_STD = 0.02


def residual_std(depth: int) -> float:
    """Standard deviation of a projection into the residual stream of a model with ``depth`` blocks."""
    return INIT_STD / math.sqrt(2 * depth)


def linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool = True,
    std: float = INIT_STD,
    dtype: torch.dtype | None = None,
) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    nn.init.normal_(layer.weight, std=std)
    set_init(layer.weight, Normal(0.0, std))
    if bias:
        nn.init.zeros_(layer.bias)
        set_init(layer.bias, Constant(0.0))
    return layer


def embedding(
    num_embeddings: int, dim: int, *, padding_idx: int | None = None, dtype: torch.dtype | None = None
) -> nn.Embedding:
    layer = nn.Embedding(num_embeddings, dim, padding_idx=padding_idx, dtype=dtype)
    nn.init.normal_(layer.weight, std=INIT_STD)
    drawn = Normal(0.0, INIT_STD)
    set_init(layer.weight, drawn)
    if padding_idx is not None:
        with torch.no_grad():
            layer.weight[padding_idx].zero_()
        set_init(layer.weight, ZeroRow(drawn, padding_idx, dim))
    return layer


def patches(
    in_channels: int, dim: int, size: int, *, bias: bool = True, dtype: torch.dtype | None = None
) -> nn.Conv2d:
    """One vector of ``dim`` features for each square of ``size`` pixels, which do not overlap."""
    layer = nn.Conv2d(in_channels, dim, kernel_size=size, stride=size, bias=bias, dtype=dtype)
    nn.init.normal_(layer.weight, std=INIT_STD)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def layer_norm(dim: int, *, eps: float = 1e-5, dtype: torch.dtype | None = None) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=eps, dtype=dtype)
