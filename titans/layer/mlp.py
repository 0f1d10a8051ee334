"""The two linear layers of a transformer block, with an activation in between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from titans.layer.basic import INIT_STD, linear
from titans.layer.basic import dropout as residual_dropout


class TransformerMLP(nn.Module):
    """``hidden -> mlp_ratio * hidden -> hidden``, each token by itself."""

    def __init__(
        self,
        hidden_size: int,
        mlp_ratio: float = 4.0,
        activation: Callable[[Tensor], Tensor] = gelu,
        dropout: float = 0.0,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        inner_size = int(hidden_size * mlp_ratio)
        if inner_size < 1:
            raise ValueError(
                f"mlp_ratio={mlp_ratio} leaves no features inside the MLP of hidden_size={hidden_size}"
            )
        self.dense_1 = linear(hidden_size, inner_size, role="expand", bias=bias, dtype=dtype)
        self.activation = activation
        self.dense_2 = linear(
            inner_size, hidden_size, role="contract", bias=bias, dtype=dtype, std=output_std
        )
        self.dropout = residual_dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.dense_1(x))  # (batch, seq, mlp_ratio * hidden)
        return self.dropout(self.dense_2(x))  # (batch, seq, hidden)


ViTMLP = TransformerMLP  # the two kinds of model share their MLP
