"""Mixture of experts: routers, experts, and the layer that sends tokens to them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from colossalai.nn.layer.moe.experts import Experts, FFNExperts, MoeExperts, TPExperts, build_ffn_experts
from colossalai.nn.layer.moe.layers import MoeLayer, MoeModule
from colossalai.nn.layer.moe.loads import LayerLoads, draw_loads, load_table
from colossalai.nn.layer.moe.routers import (
    ExpertLoads,
    MoeRouter,
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    UniformNoiseGenerator,
)

# They live above this package, and are fetched when asked for.
_HOMES = {
    "LoadHistory": "colossalai.nn.expert_loads",
    "load_moe_model": "colossalai.checkpoint_io",
    "save_moe_model": "colossalai.checkpoint_io",
}

__all__ = [
    "ExpertLoads",
    "Experts",
    "FFNExperts",
    "LayerLoads",
    "LoadHistory",
    "MoeExperts",
    "MoeLayer",
    "MoeModule",
    "MoeRouter",
    "NormalNoiseGenerator",
    "TPExperts",
    "Top1Router",
    "Top2Router",
    "UniformNoiseGenerator",
    "build_ffn_experts",
    "draw_loads",
    "load_moe_model",
    "load_table",
    "save_moe_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
