"""The documented place of mixtures of experts, which live in ``colossalai.nn.layer.moe``."""

from colossalai.nn.layer.moe import (
    Experts,
    FFNExperts,
    MoeExperts,
    MoeLayer,
    MoeModule,
    MoeRouter,
    NormalNoiseGenerator,
    Top1Router,
    Top2Router,
    TPExperts,
    UniformNoiseGenerator,
    __getattr__,  # load_moe_model and save_moe_model
    build_ffn_experts,
)

__all__ = [
    "Experts",
    "FFNExperts",
    "MoeExperts",
    "MoeLayer",
    "MoeModule",
    "MoeRouter",
    "NormalNoiseGenerator",
    "TPExperts",
    "Top1Router",
    "Top2Router",
    "UniformNoiseGenerator",
    "__getattr__",
    "build_ffn_experts",
]
