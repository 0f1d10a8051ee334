"""Folders of checkpoints go to and come from Hugging Face transformers, tied weights included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.checkpoint_io import GeneralCheckpointIO

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")


def _gpt() -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("size_per_shard", [0.05, 1024])
def test_transformers_opens_our_folder(use_safetensors: bool, size_per_shard: float, tmp_path: Path) -> None:
    model = _gpt()
    model.config.save_pretrained(tmp_path)
    GeneralCheckpointIO().save_model(model, tmp_path, True, True, None, size_per_shard, use_safetensors)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, use_safetensors=use_safetensors
    )
    assert not any(info.values())
    assert _equal(model, loaded)


@pytest.mark.parametrize("max_shard_size", ["60KB", "1GB"])
def test_we_open_the_folder_of_transformers(max_shard_size: str, tmp_path: Path) -> None:
    model, other = _gpt(), _gpt()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    GeneralCheckpointIO().load_model(other, tmp_path)
    assert _equal(model, other)
