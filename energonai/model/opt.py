"""OPT of the published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from energonai.model.building import build
from energonai.model.generating import GeneratingModel

# Layers, width, heads; the inner width of a block is four times the width.
_SIZES = {
    "125M": (12, 768, 12),
    "6B": (32, 4096, 32),
    "30B": (48, 7168, 56),
    "66B": (64, 9216, 72),
    "175B": (96, 12288, 96),
}


def _opt(
    size: str,
    *,
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    half: bool = False,
    **changes: Any,
) -> GeneratingModel:
    from transformers import OPTConfig, OPTForCausalLM

    layers, width, heads = _SIZES[size]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "num_attention_heads": heads,
        "ffn_dim": 4 * width,
    }
    return GeneratingModel(build(OPTForCausalLM, OPTConfig(**{**sizes, **changes}), checkpoint, dtype, half))


def opt_125M(**kwargs: Any) -> GeneratingModel:
    """``checkpoint``, ``dtype`` and ``half`` are those of ``build``; others change the ``OPTConfig``."""
    return _opt("125M", **kwargs)


def opt_6B(**kwargs: Any) -> GeneratingModel:
    """6.7 billion parameters; see ``opt_125M``."""
    return _opt("6B", **kwargs)


def opt_30B(**kwargs: Any) -> GeneratingModel:
    """See ``opt_125M``."""
    return _opt("30B", **kwargs)


def opt_66B(**kwargs: Any) -> GeneratingModel:
    """See ``opt_125M``."""
    return _opt("66B", **kwargs)


def opt_175B(**kwargs: Any) -> GeneratingModel:
    """See ``opt_125M``."""
    return _opt("175B", **kwargs)
