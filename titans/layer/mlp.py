"""The two linear layers of a transformer block, with an activation in between; or experts, each of two such
layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from colossalai.nn.layer.moe import FFNExperts, MoeModule
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
        inner_size = _inner_size(hidden_size, mlp_ratio)
        self.dense_1 = linear(hidden_size, inner_size, role="expand", bias=bias, dtype=dtype)
        self.activation = activation
        self.dense_2 = linear(
            inner_size, hidden_size, role="contract", bias=bias, dtype=dtype, std=output_std
        )
        self.dropout = residual_dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.dense_1(x))  # (batch, seq, mlp_ratio * hidden)
        return self.dropout(self.dense_2(x))  # (batch, seq, hidden)


class ExpertMLP(nn.Module):
    """Experts in the place of a ``TransformerMLP``, of which a router chooses ``top_k`` for each token.

    ``use_residual``: all tokens go through a ``TransformerMLP`` beside their experts, and the two outputs are
    weighted.  The other arguments after ``output_std`` are those of ``colossalai.nn.layer.moe.MoeModule``.
    Experts draw their own weights: ``output_std`` is that of the MLP beside them.
    """

    def __init__(
        self,
        hidden_size: int,
        mlp_ratio: float = 4.0,
        activation: Callable[[Tensor], Tensor] = gelu,
        dropout: float = 0.0,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        output_std: float = INIT_STD,
        *,
        num_experts: int,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
    ) -> None:
        super().__init__()
        inner_size = _inner_size(hidden_size, mlp_ratio)
        beside = None
        if use_residual:
            beside = TransformerMLP(
                hidden_size, mlp_ratio, activation, bias=bias, dtype=dtype, output_std=output_std
            )
        self.moe = MoeModule(
            hidden_size,
            num_experts,
            top_k,
            capacity_factor_train,
            capacity_factor_eval,
            min_capacity,
            noisy_policy,
            drop_tks,
            use_residual,
            residual_instance=beside,
            expert_instance=FFNExperts(
                num_experts, hidden_size, inner_size, activation, bias=bias, dtype=dtype
            ),
        )
        self.dropout = residual_dropout(dropout)

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """``routed`` (batch, seq) is False at padding, which goes to no expert."""
        return self.dropout(self.moe(x, routed))  # (batch, seq, hidden)


def _inner_size(hidden_size: int, mlp_ratio: float) -> int:
    inner_size = int(hidden_size * mlp_ratio)
    if inner_size < 1:
        raise ValueError(
            f"mlp_ratio={mlp_ratio} leaves no features inside the MLP of hidden_size={hidden_size}"
        )
    return inner_size


ViTMLP = TransformerMLP  # the two kinds of model share their MLP
