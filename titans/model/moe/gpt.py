"""GPT with experts, and the published sizes of the pyramid-residual kind.

PR-MoE ("DeepSpeed-MoE: Advancing Mixture-of-Experts Inference and Training to Power Next-Generation AI
Scale") has experts in every second block: more of them in the last two such blocks (a pyramid), and each
token goes through one MLP and one expert (residual).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titans.layer.block import GPTBlock, MOEGPTBlock
from titans.model.gpt import GPT
from titans.model.moe.numbers import experts_of_blocks

__all__ = ["MOEGPT", "prmoe_4b", "prmoe_31b"]


class MOEGPT(GPT):
    """A ``GPT`` with experts in the place of some MLPs.

    Args:
        num_experts: of every second block, or a list with one number for each block, 0 for an MLP.
        top_k, capacity_factor_train, capacity_factor_eval, min_capacity, noisy_policy, drop_tks: how tokens
            find their experts; see ``colossalai.nn.layer.moe.MoeModule``.  Padding (``attention_mask``) goes
            to no expert.
        use_residual: tokens go through an MLP beside their experts.
        kwargs: those of ``GPT``.
    """

    def __init__(
        self,
        num_experts: int | Sequence[int] = 8,
        *,
        depth: int = 12,
        top_k: int = 1,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_policy: str | None = None,
        drop_tks: bool = True,
        use_residual: bool = False,
        **kwargs: Any,
    ) -> None:
        numbers = experts_of_blocks(num_experts, depth)
        routing = {
            "top_k": top_k,
            "capacity_factor_train": capacity_factor_train,
            "capacity_factor_eval": capacity_factor_eval,
            "min_capacity": min_capacity,
            "noisy_policy": noisy_policy,
            "drop_tks": drop_tks,
            "use_residual": use_residual,
        }

        def block(number: int, **options: Any) -> GPTBlock:
            if not numbers[number]:
                return GPTBlock(**options)
            return MOEGPTBlock(num_experts=numbers[number], routing=routing, **options)

        super().__init__(depth=depth, block=block, **kwargs)


def _pyramid(depth: int, low: int, high: int) -> list[int]:
    """Every second block has experts; the last two of them have more."""
    return [0 if not number % 2 else high if number >= depth - 4 else low for number in range(depth)]


# name -> experts of a block, experts of the last two such blocks, and what differs from GPT's defaults
_SIZES: dict[str, tuple[tuple[int, int], dict[str, int]]] = {
    "prmoe_4b": ((32, 64), {"hidden_size": 1024, "depth": 24, "num_heads": 16}),
    "prmoe_31b": ((64, 128), {"hidden_size": 2048, "depth": 24, "num_heads": 16}),
}


def _build(size: str, changes: dict[str, Any]) -> MOEGPT:
    numbers, sizes = _SIZES[size]
    options: dict[str, Any] = {
        "max_position_embeddings": 2048,
        "top_k": 1,
        "use_residual": True,
        **sizes,
        **changes,
    }
    options.setdefault("num_experts", _pyramid(options["depth"], *numbers))
    return MOEGPT(**options)


def prmoe_4b(**kwargs: Any) -> MOEGPT:
    """PR-MoE of 4 billion parameters: the 350-million GPT with 32 and 64 experts; keyword arguments go to
    ``MOEGPT``.
    """
    return _build("prmoe_4b", kwargs)


def prmoe_31b(**kwargs: Any) -> MOEGPT:
    """PR-MoE of 31 billion parameters: the 1.3-billion GPT with 64 and 128 experts."""
    return _build("prmoe_31b", kwargs)
