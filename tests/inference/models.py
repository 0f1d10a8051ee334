"""Tiny language models with weights that make clear choices, and what transformers writes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from titans.dataloader.text import stdlib_text
from titans.model.gpt import GPT

WORDS, POSITIONS = 131, 64  # a prime: no number of ranks divides it
_TOKENS = {"vocab_size": WORDS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    **_TOKENS,
}
_SMALL = {"n_layer": 2, "n_head": 4, **_TOKENS}

_BUILD: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "opt": lambda more: OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            ffn_dim=48,
            word_embed_proj_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            **_TOKENS,
            **more,
        )
    ),
    "gpt2": lambda more: GPT2LMHeadModel(
        GPT2Config(**{"n_embd": 32, "n_positions": POSITIONS, **_SMALL, **more})
    ),
    "bloom": lambda more: BloomForCausalLM(BloomConfig(hidden_size=32, **_SMALL, **more)),
    "llama": lambda more: LlamaForCausalLM(LlamaConfig(**{**_LLAMA, **more})),
    "qwen3": lambda more: Qwen3ForCausalLM(Qwen3Config(**{**_LLAMA, "head_dim": 8, **more})),
    "mistral": lambda more: MistralForCausalLM(MistralConfig(**{**_LLAMA, "sliding_window": 6, **more})),
    "mixtral": lambda more: MixtralForCausalLM(MixtralConfig(**{**_LLAMA, "num_local_experts": 4, **more})),
    "titans": lambda more: GPT(WORDS, POSITIONS, 32, 4, 2, **more),
}
NAMED = ("opt", "gpt2", "bloom", "llama", "qwen3")


def build(name: str, **more: Any) -> Any:
    torch.manual_seed(1)
    model = _BUILD[name](more)
    for param in model.parameters():
        if param.ndim > 1:
            nn.init.normal_(param, std=0.3)
    return model.eval()


def prompts() -> list[list[int]]:
    """Prompts of one token, of many, and some that begin alike."""
    numbers = torch.Generator().manual_seed(2)
    drawn = [torch.randint(2, WORDS, (n,), generator=numbers).tolist() for n in (1, 5, 17, 30)]
    return [*drawn, [7, 8, 9] * 5, [7, 8, 9] * 6, drawn[2]]


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What the model writes by itself."""
    if hasattr(model, "generate"):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "pad_token_id": 1, "attention_mask": torch.ones_like(ids)}
        return model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def log_probabilities(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    out = model(torch.tensor([tokens]))
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return logits[0].log_softmax(-1)


def trained() -> Any:
    """A small model that has read some of Python's standard library, byte by byte."""
    text = torch.frombuffer(bytearray(stdlib_text(200_000).train), dtype=torch.uint8).long()
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**{**_LLAMA, **sizes, "num_key_value_heads": 4}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        starts = torch.randint(len(text) - 64, (16,))
        ids = torch.stack([text[start : start + 64] for start in starts.tolist()])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Bytes:
    """A tokenizer of bytes: a character may take several tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class SpecialBytes(Bytes):
    """Bytes, and above them tokens without text; it knows the longest list that it has decoded."""

    longest = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.longest = max(self.longest, len(tokens))
        return super().decode([token for token in tokens if token < 256])


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 30 for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t + 30) for t in tokens)
