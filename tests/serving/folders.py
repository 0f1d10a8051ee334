"""A small model of Hugging Face with a tokenizer, as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def tokenizer() -> Any:
    """Tokens are bytes, so no file is needed."""
    from transformers import GPT2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    return GPT2Tokenizer(vocab={**alphabet, "<|endoftext|>": len(alphabet)}, merges=[])


def write_opt(folder: Path, **changes: Any) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 64}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
    config = OPTConfig(
        **{
            **sizes,
            "vocab_size": 300,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            **special,
            **changes,
        }
    )
    config.init_std = 0.3
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
