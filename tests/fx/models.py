"""Small models of transformers with a batch that gives them a loss, and models whose code asks for values."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
_WIDE = {**_SMALL, "intermediate_size": 32}
_KEYS = {**_WIDE, "num_key_value_heads": 2, "max_position_embeddings": 32}
# class, config, options
_LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_SMALL, "n_positions": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", _WIDE),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_SMALL,
            "ffn_dim": 32,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
            "layerdrop": 0.5,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 32,
            "decoder_start_token_id": 0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _KEYS),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_KEYS, "num_local_experts": 4}),
}
FAMILIES = [*_LANGUAGE, "vit"]


def build(family: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in training mode, and a batch."""
    torch.manual_seed(0)
    if family == "vit":
        config = transformers.ViTConfig(**_WIDE, image_size=8, patch_size=4, num_labels=5)
        model: nn.Module = transformers.ViTForImageClassification(config)
        batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 3])}
    else:
        kind, config_kind, options = _LANGUAGE[family]
        options = {**options, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        model = getattr(transformers, kind)(getattr(transformers, config_kind)(**options))
        ids = torch.randint(3, 32, (2, 8))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        batch["attention_mask"][1, 6:] = 0
    return model.train(), batch


class Branch(nn.Module):
    """Goes one of two ways by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.inner(x)
        return self.inner(x) * 2


class Selection(nn.Module):
    """Computes with some rows of its input alone, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        rows = x.sum(-1) > 0
        result = torch.zeros_like(x)
        result[rows] = self.inner(x[rows])
        return {"rows": result, "kind": "selection"}


class Asking(nn.Module):
    """A model of which two kinds of modules ask for values; one parameter is not used, one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.branches = nn.ModuleList([Branch(), Branch()])
        self.selection = Selection()
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = torch.relu_(self.first(x))
        for branch in self.branches:
            x = branch(x)
        x = nn.functional.dropout(x + self.selection(x)["rows"], 0.2, self.training)
        return self.last(self.norm(x)).pow(2).mean() * scale


class Numpy(nn.Module):
    """Leaves torch, which no tensor without values can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.outside = Outside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.first(x)).sum()


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(x.detach().numpy().mean())
