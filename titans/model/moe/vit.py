"""Vision transformers with experts: in every second block, or one set of them for all blocks (WideNet)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from titans.layer.block import ViTBlock
from titans.layer.mlp import ExpertMLP
from titans.model.moe.numbers import experts_of_blocks
from titans.model.vit import VisionTransformer

__all__ = ["ViTMoE", "Widenet"]


class ViTMoE(VisionTransformer):
    """A ``VisionTransformer`` with experts in the place of some MLPs.

    Args:
        num_experts: of every second block, or a list with one number for each block, 0 for an MLP.
        top_k, capacity_factor_train, capacity_factor_eval, min_capacity, noisy_policy, drop_tks: how tokens
            find their experts; see ``colossalai.nn.layer.moe.MoeModule``.
        use_residual: tokens go through an MLP beside their experts.
        kwargs: those of ``VisionTransformer``.
    """

    def __init__(
        self,
        num_experts: int | Sequence[int] = 8,
        *,
        depth: int = 12,
        top_k: int = 2,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = "Gaussian",
        drop_tks: bool = True,
        use_residual: bool = False,
        **kwargs: Any,
    ) -> None:
        numbers = experts_of_blocks(num_experts, depth)
        mlp = partial(
            ExpertMLP,
            top_k=top_k,
            capacity_factor_train=capacity_factor_train,
            capacity_factor_eval=capacity_factor_eval,
            min_capacity=min_capacity,
            noisy_policy=noisy_policy,
            drop_tks=drop_tks,
            use_residual=use_residual,
        )

        def block(number: int, **options: Any) -> ViTBlock:
            if not numbers[number]:
                return ViTBlock(**options)
            return ViTBlock(mlp=partial(mlp, num_experts=numbers[number]), **options)

        super().__init__(depth=depth, block=block, **kwargs)


class Widenet(VisionTransformer):
    """WideNet ("Go Wider Instead of Deeper"): a ``VisionTransformer`` whose blocks all have the same
    attention, router and experts.  Only their layer norms differ, so that each block routes its tokens anew.

    Args:
        num_experts: of which each token goes to ``top_k``.
        capacity_factor_train, capacity_factor_eval, min_capacity, noisy_policy, drop_tks: how tokens find
            their experts; see ``colossalai.nn.layer.moe.MoeModule``.
        kwargs: those of ``VisionTransformer``.
    """

    def __init__(
        self,
        num_experts: int = 4,
        *,
        top_k: int = 2,
        capacity_factor_train: float = 1.2,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = "Gaussian",
        drop_tks: bool = True,
        **kwargs: Any,
    ) -> None:
        mlp = partial(
            ExpertMLP,
            num_experts=num_experts,
            top_k=top_k,
            capacity_factor_train=capacity_factor_train,
            capacity_factor_eval=capacity_factor_eval,
            min_capacity=min_capacity,
            noisy_policy=noisy_policy,
            drop_tks=drop_tks,
        )
        first: list[ViTBlock] = []

        def block(number: int, **options: Any) -> ViTBlock:
            if first:
                return ViTBlock(mlp=lambda *_, **__: first[0].mlp, attn=first[0].attn, **options)
            first.append(ViTBlock(mlp=mlp, **options))
            return first[0]

        super().__init__(block=block, **kwargs)
