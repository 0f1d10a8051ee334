"""How much memory ranks take while a model is built without memory and boosted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster.plugin import Plugin
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.utils.memory.live_bytes import LiveBytes
from tests.lazy.families import LAUNCHES, PLUGINS, SEED, boosted

HIDDEN, LAYERS, VOCABULARY = 32, 12, 96


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
        )
    )


class ActualBytes(LiveBytes):
    """Also sees that memory shrinks: chunks are freed in place."""

    most = 0

    @property
    def actual(self) -> int:
        found = [ref() for ref in self._storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        before = len(self._storages)
        super().hold(tensors)
        if len(self._storages) > before:
            self.most = max(self.most, self.actual)


def measure(plan: str) -> tuple[int, int]:
    """The bytes of this rank's pieces, and the most that were live at once."""
    torch.manual_seed(SEED)
    with ActualBytes() as live:
        with LazyInitContext(large=1):
            model = llama()
        if plan == "1d":
            model = parallelize(model)
        elif plan == "pipeline":
            model = split_model(model)
        boosted(model, _plugin(plan))
        return live.actual, live.most


def _plugin(plan: str) -> Plugin | None:
    if plan.startswith("gemini"):  # chunks of two blocks
        options: dict[str, Any] = {"search_range_mb": 0.1, "min_chunk_size_mb": 0.1, "hidden_dim": HIDDEN}
        return PLUGINS[plan](**options)  # type: ignore[call-arg]
    if plan == "zero2":
        return PLUGINS[plan](reduce_bucket_size_in_m=0.02)  # type: ignore[call-arg]
    return PLUGINS[plan]() if plan in PLUGINS else None


def measure_plans(rank: int, world_size: int, port: int) -> dict[str, tuple[int, int]]:
    torch.set_num_threads(1)
    found = {}
    for config, plans in LAUNCHES.values():
        colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
        found |= {plan: measure(plan) for plan in (*plans, *([] if config else ["none"]))}
        gpc.destroy()
    return found
