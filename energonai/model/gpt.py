"""GPT-2 and GPT-3 of the published sizes, as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from energonai.model.building import build
from energonai.model.generating import GeneratingModel

# Layers, width, heads, positions.
_SIZES = {
    "gpt2_small": (12, 768, 12, 1024),
    "gpt2_large": (36, 1280, 20, 1024),
    "gpt2_8B": (72, 3072, 24, 1024),
    "gpt3": (96, 12288, 96, 2048),
}


def _gpt(
    size: str,
    *,
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    half: bool = False,
    **changes: Any,
) -> GeneratingModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, positions = _SIZES[size]
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions}
    return GeneratingModel(
        build(GPT2LMHeadModel, GPT2Config(**{**sizes, **changes}), checkpoint, dtype, half)
    )


def gpt2_small(**kwargs: Any) -> GeneratingModel:
    """``checkpoint``, ``dtype`` and ``half`` are those of ``build``; others change the ``GPT2Config``."""
    return _gpt("gpt2_small", **kwargs)


def gpt2_large(**kwargs: Any) -> GeneratingModel:
    """See ``gpt2_small``."""
    return _gpt("gpt2_large", **kwargs)


def gpt2_8B(**kwargs: Any) -> GeneratingModel:
    """8.3 billion parameters; see ``gpt2_small``."""
    return _gpt("gpt2_8B", **kwargs)


def gpt3(**kwargs: Any) -> GeneratingModel:
    """175 billion parameters; see ``gpt2_small``."""
    return _gpt("gpt3", **kwargs)


def hf_gpt2(**kwargs: Any) -> GeneratingModel:
    """The checkpoint ``gpt2`` of Hugging Face, as a folder in ``checkpoint``; see ``gpt2_small``."""
    return _gpt("gpt2_small", **kwargs)
