"""The models whose activation checkpointing is measured: how each is built, its batches and its criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from titans.model import resnet

Builder = Callable[[int | None], nn.Module]
"""Builds a model with so many layers, or with all."""


class Case(NamedTuple):
    """How a model is built, its batch of so many samples, its criterion, and the sizes of batches."""

    build: Builder
    batch: Callable[[int], Any]
    criterion: nn.Module | None
    batches: tuple[int, ...]


def _tokens(length: int, words: int) -> Callable[[int], Any]:
    def make(samples: int) -> Any:
        ids = torch.randint(words, (samples, length))
        return {"input_ids": ids, "labels": ids}

    return make


def _images(pixels: int, classes: int) -> Callable[[int], Any]:
    return lambda n: (torch.rand(n, 3, pixels, pixels), torch.randint(classes, (n,)))


def _pixels(samples: int) -> Any:
    return {"pixel_values": torch.rand(samples, 3, 224, 224), "labels": torch.randint(1000, (samples,))}


def _resnet(name: str) -> Builder:
    def build(layers: int | None) -> nn.Module:
        try:
            from torchvision import models
        except ImportError:
            return getattr(resnet, name)()  # type: ignore[no-any-return]
        return getattr(models, name)()  # type: ignore[no-any-return]

    return build


def _hugging_face(model: str, config: str, layers_name: str = "num_hidden_layers", **sizes: int) -> Builder:
    def build(layers: int | None) -> nn.Module:
        import transformers as hf

        chosen = sizes if layers is None else {**sizes, layers_name: layers}
        return getattr(hf, model)(getattr(hf, config)(**chosen))  # type: ignore[no-any-return]

    return build


def _gpt2(**sizes: int) -> Builder:
    return _hugging_face("GPT2LMHeadModel", "GPT2Config", "n_layer", bos_token_id=0, eos_token_id=0, **sizes)


LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
}
XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
_CROSS_ENTROPY = nn.CrossEntropyLoss()
CASES = {
    "resnet50": Case(_resnet("resnet50"), _images(224, 1000), _CROSS_ENTROPY, (64, 128, 256)),
    "resnet152": Case(_resnet("resnet152"), _images(224, 1000), _CROSS_ENTROPY, (64, 128, 256)),
    "gpt2": Case(_gpt2(), _tokens(1024, 50257), None, (8, 16, 32)),
    "gpt2-xl": Case(_gpt2(**XL), _tokens(1024, 50257), None, (2, 4, 8)),
    "bert": Case(_hugging_face("BertForMaskedLM", "BertConfig"), _tokens(512, 30522), None, (32, 64, 128)),
    "vit": Case(
        _hugging_face("ViTForImageClassification", "ViTConfig", num_labels=1000),
        _pixels,
        None,
        (128, 256, 512),
    ),
    "llama": Case(
        _hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), _tokens(1024, 50304), None, (4, 8, 16)
    ),
}
_TOY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
SMALL = {
    "gpt2": Case(_gpt2(n_embd=64, n_layer=4, n_head=2, vocab_size=64), _tokens(64, 64), None, (4, 8)),
    "resnet": Case(
        lambda layers: resnet.resnet18(10, small_images=True), _images(16, 10), _CROSS_ENTROPY, (8,)
    ),
    "llama": Case(
        _hugging_face("LlamaForCausalLM", "LlamaConfig", **_TOY, intermediate_size=128, vocab_size=64),
        _tokens(64, 64),
        None,
        (4,),
    ),
}
