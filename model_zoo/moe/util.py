"""Experts of torch's own layers, for MoE layers built by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

__all__ = ["VanillaFFN", "moe_mlp_args"]


class VanillaFFN(nn.Module):
    """An expert: ``d_model -> d_ff -> d_model``, with GELU in between and dropout after both layers."""

    def __init__(self, d_model: int, d_ff: int, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.dense1 = nn.Linear(d_model, d_ff)
        self.dense2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.dropout(gelu(self.dense1(x)))  # (rows, d_ff)
        y: Tensor = self.dropout(self.dense2(wide))  # (rows, d_model)
        return y


def moe_mlp_args(d_model: int, d_ff: int, drop_rate: float = 0.0) -> dict[str, Any]:
    """The arguments of ``VanillaFFN``: ``Experts(expert=VanillaFFN, num_experts=4, **moe_mlp_args(...))``."""
    return {"d_model": d_model, "d_ff": d_ff, "drop_rate": drop_rate}
