"""Tiny models of the architectures that can be cut, with a batch and labels for each, and the modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import colossalai
from colossalai.testing.parity import Problem

VOCABULARY = 131  # a prime: no number of ranks divides it
BATCH, LENGTH = 4, 6
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(**options: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 16}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **drops, **_TOKENS, **options}))


def bert(**options: Any) -> nn.Module:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(**{**_block(), **drops, **_TOKENS, **options})
    return BertForMaskedLM(config)


def opt(**options: Any) -> nn.Module:
    sizes = {**_block(), "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}
    sizes.pop("intermediate_size")
    return OPTForCausalLM(OPTConfig(**{**sizes, **_TOKENS, **options}))


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_block(), **_TOKENS, **options}))


def qwen2(**options: Any) -> nn.Module:
    grouped = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = Qwen2Config(**{**_block(), **_TOKENS, **grouped, **options})
    return Qwen2ForCausalLM(config)


def qwen3(**options: Any) -> nn.Module:
    grouped = {"num_key_value_heads": 4, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**{**_block(), **_TOKENS, **grouped, **options}))


def t5(**options: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 32, "num_layers": 2, "dropout_rate": 0.0}
    tokens = {**_TOKENS, "decoder_start_token_id": 1, "relative_attention_num_buckets": 8}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **tokens, **options}))


def vit(**options: Any) -> nn.Module:
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {**_block(), "image_size": 8, "patch_size": 4, "num_labels": 5}
    return ViTForImageClassification(ViTConfig(**{**sizes, **drops, **options}))


def mistral(**options: Any) -> nn.Module:
    return MistralForCausalLM(
        MistralConfig(**{**_block(), **_TOKENS, "num_key_value_heads": 4, "sliding_window": 4, **options})
    )


# without a policy of ours, by the plan of the config


def gpt_neox(**options: Any) -> nn.Module:
    drops = dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**_block(), **drops, **_TOKENS, **options}))


def gemma2(**options: Any) -> nn.Module:
    """Its head is tied to a table that the plan does not name and that scales what it looks up."""
    return Gemma2ForCausalLM(Gemma2Config(**{**_block(), **_TOKENS, "head_dim": 4, **options}))


def starcoder2(**options: Any) -> nn.Module:
    """Its head is tied to a plain table that the plan does not name."""
    drops = dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0)
    return Starcoder2ForCausalLM(Starcoder2Config(**{**_block(), **drops, **_TOKENS, **options}))


def phi3(**options: Any) -> nn.Module:
    """Its plan gathers query, key and value, so every rank computes all heads."""
    return Phi3ForCausalLM(Phi3Config(**{**_block(), **_TOKENS, **options}))


def _block() -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    }


BUILD: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f
    for f in (gpt2, bert, opt, llama, mistral, qwen2, qwen3, t5, vit, gpt_neox, gemma2, starcoder2, phi3)
}


MODES: dict[str, dict[str, Any]] = {
    "1d": {"size": 4, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}


def launch(tensor: dict[str, Any]) -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, backend="gloo", verbose=False)


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = BUILD[name](**options)
    for path, param in model.named_parameters():
        # biases and the norms' weights that start at 0 or 1 would hide a wrong cut
        param.data.add_(torch.randn_like(param) * 0.05)
        # softmax does not see a bias of the keys: its gradient is all rounding, and there is nothing to
        # compare
        param.requires_grad_(not path.endswith(("k_proj.bias", "key.bias")))
    return model.train()


def batch(name: str, step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if name == "vit":
        images = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (BATCH,), generator=generator)}
    ids = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(2, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0  # rows of different lengths: a mean of means would be wrong
    labels[0, -2:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def problem(name: str, steps: int = 3, **options: Any) -> Problem:
    return Problem(
        build=lambda: build(name, **options),
        batches=[batch(name, step) for step in range(steps)],
        loss=lambda model, given: model(**given).loss,
    )
