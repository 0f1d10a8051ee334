"""OPT of every size, without memory: a model on the meta device that knows what its weights are drawn
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, PretrainedConfig

from colossalai.mesh.weights.initial import Constant, Normal, ZeroRow, set_init

# Layers, width, heads; the inner width of a block is four times the width.
SIZES = {
    "tiny": (2, 64, 4),
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
}
# What is special about a size.
SPECIAL: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "max_position_embeddings": 64},
    "350m": {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
}


def opt_config(size: str) -> OPTConfig:
    """``size`` is ``125m``, or a name that ends with it, such as ``facebook/opt-125m``."""
    key = size.rpartition("opt-")[2]
    if key not in SIZES:
        raise ValueError(f"there is no OPT of size {size!r}; there are {', '.join(SIZES)}")
    layers, width, heads = SIZES[key]
    options = {"word_embed_proj_dim": width, **SPECIAL.get(key, {})}
    return OPTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        ffn_dim=4 * width,
        **options,
    )


def config_of(name: str, synthetic: bool) -> PretrainedConfig:
    """Of a folder; or of a size, where no weights are needed."""
    if (Path(name) / "config.json").is_file():
        return AutoConfig.from_pretrained(name, local_files_only=True)
    if not synthetic:
        raise FileNotFoundError(
            f"{name} is not a folder with a config.json and weights; download the checkpoint first, or pass"
            " -s (random tokens and weights) or --config_name SIZE (train from scratch)"
        )
    return opt_config(name)


def build(config: PretrainedConfig, whole: bool) -> nn.Module:
    """The model with activation checkpointing; without memory, unless ``whole``."""
    config.use_cache = False
    if whole:
        model = AutoModelForCausalLM.from_config(config)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        _say_what_to_draw(model, getattr(config, "init_std", 0.02))
    # the second name is that of transformers before 5.23
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def _say_what_to_draw(model: nn.Module, std: float) -> None:
    """As transformers does: normal weights, no biases, nothing for padding."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            table = ZeroRow(Normal(std=std), module.padding_idx, module.embedding_dim)
            set_init(module.weight, table)
        elif isinstance(module, nn.Embedding):
            set_init(module.weight, Normal(std=std))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if not hasattr(module.weight, "init"):  # a head that is tied to an embedding has been told
                set_init(module.weight, Normal(std=std))
            if module.bias is not None:
                set_init(module.bias, Constant(0.0))
