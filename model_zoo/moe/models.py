"""WideNet and a ViT with experts, with the older names of arguments."""

from __future__ import annotations

from typing import Any

from titans.model import moe

__all__ = ["ViTMoE", "Widenet"]


class Widenet(moe.Widenet):
    """WideNet; further arguments are those of ``titans.model.moe.Widenet``.

    Args:
        capacity_factor: the places of an expert in training, as a multiple of its share of the tokens.
    """

    def __init__(self, num_experts: int = 4, capacity_factor: float = 1.2, **kwargs: Any) -> None:
        super().__init__(num_experts, capacity_factor_train=capacity_factor, **kwargs)


class ViTMoE(moe.ViTMoE):
    """A ViT with experts in every second block; see ``titans.model.moe.ViTMoE`` for other arguments."""

    def __init__(self, num_experts: int = 8, capacity_factor: float = 1.25, **kwargs: Any) -> None:
        super().__init__(num_experts, capacity_factor_train=capacity_factor, **kwargs)
