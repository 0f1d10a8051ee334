"""BERT, which gives hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from energonai.model.building import build

# Layers, width, heads.
_SIZES = {
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "8B": (72, 3072, 24),
    "175B": (96, 12288, 96),
}


def _bert(
    size: str,
    *,
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    half: bool = False,
    **changes: Any,
) -> nn.Module:
    from transformers import BertConfig, BertModel

    layers, width, heads = _SIZES[size]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return build(BertModel, BertConfig(**{**sizes, **changes}), checkpoint, dtype, half)


def bert_small(**kwargs: Any) -> nn.Module:
    """``checkpoint``, ``dtype`` and ``half`` are those of ``build``; others change the ``BertConfig``."""
    return _bert("small", **kwargs)


def bert_base(**kwargs: Any) -> nn.Module:
    """See ``bert_small``."""
    return _bert("base", **kwargs)


def bert_large(**kwargs: Any) -> nn.Module:
    """See ``bert_small``."""
    return _bert("large", **kwargs)


def bert_8B(**kwargs: Any) -> nn.Module:
    """See ``bert_small``."""
    return _bert("8B", **kwargs)


def bert_175B(**kwargs: Any) -> nn.Module:
    """See ``bert_small``."""
    return _bert("175B", **kwargs)
