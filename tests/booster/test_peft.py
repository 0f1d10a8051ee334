"""LoRA models of PEFT: under every plugin only the adapters are trained and saved, as in one process.

Tensor and pipeline plans: ``tests/nn/policies/test_adapters.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.testing import spawn

transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")
peft = pytest.importorskip("peft", reason="needs `pip install peft`")

WORDS = torch.arange(32).view(4, 8) % 13


def base() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.LlamaConfig(vocab_size=13, max_position_embeddings=16, **sizes)
    return transformers.LlamaForCausalLM(config)


def with_adapters() -> Any:
    model = base()
    torch.manual_seed(1)
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(model, options)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero by default, so that nothing of A would be trained in the first step
            nn.init.normal_(p, std=0.1)
    return model


def frozen_weights() -> dict[str, Tensor]:
    """The weights of the base, by their names in the model with adapters."""
    return {
        name: value.clone() for name, value in with_adapters().state_dict().items() if "lora_" not in name
    }


def optimizer_of(model: nn.Module, *, all_parameters: bool) -> torch.optim.Optimizer:
    """Of what is trained, or, as scripts also write it, of all parameters."""
    wanted = model.parameters() if all_parameters else [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(wanted, lr=1e-2, weight_decay=0.1)


def serial(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    model = with_adapters()
    optimizer, losses = optimizer_of(model, all_parameters=False), []
    for _ in range(steps):
        loss = model(input_ids=WORDS, labels=WORDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return peft.get_peft_model_state_dict(model), losses


def plugins() -> dict[str, Plugin | None]:
    tiny = {"min_chunk_size_mb": 64 * 4 / 1024**2, "search_range_mb": 64 * 4 / 1024**2}
    return {
        "none": None,
        "ddp": TorchDDPPlugin(),
        "fsdp": TorchFSDPPlugin(),
        "zero-1": LowLevelZeroPlugin(1, "fp32"),
        "zero-2": LowLevelZeroPlugin(2, "fp32"),
        "gemini cpu": GeminiPlugin(device="cpu", precision="fp32", **tiny),
        "gemini cuda": GeminiPlugin(device="cpu", precision="fp32", placement_policy="cuda"),
    }


def check_adapters(rank: int, world_size: int, port: int, folder: Path) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    (expected, losses), frozen = serial(3), frozen_weights()
    for name, plugin in plugins().items():
        for all_parameters in (False, True) if name in ("fsdp", "zero-2", "gemini cpu") else (False,):
            booster = Booster(device=None if "gemini" in name else "cpu", plugin=plugin)
            inner = with_adapters()
            optimizer = optimizer_of(inner, all_parameters=all_parameters)
            model, optimizer, *_ = booster.boost(inner, optimizer)
            own = WORDS if plugin is None else WORDS.chunk(world_size)[rank]
            for wanted in losses:
                loss = model(input_ids=own, labels=own).loss
                optimizer.zero_grad()
                booster.backward(loss, optimizer)
                optimizer.step()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                assert float(mean) / world_size == pytest.approx(wanted, abs=1e-5), name
            where = folder / f"{name} {all_parameters}"
            colossalai.save_pretrained(model, where)
            check_saved(where, expected, name)
            if plugin is not None and ("gemini" in name or name == "fsdp"):
                model.save_pretrained(where / "method")  # type: ignore[operator]
                check_saved(where / "method", expected, name)
            booster.save_model(model, where / "whole.bin")
            if rank == 0:
                state = torch.load(where / "whole.bin", weights_only=True)
                changed = [key for key, value in frozen.items() if not torch.equal(state[key], value)]
                assert not changed, f"{name}: {changed}"
            dist.barrier()


def check_saved(where: Path, expected: dict[str, Tensor], name: str) -> None:
    from safetensors.torch import load_file

    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    found = {path.name for path in where.iterdir()}
    assert wanted <= found
    assert not any(path.startswith("model") for path in found), "the base is not written again"
    stored = load_file(where / "adapter_model.safetensors")
    assert stored.keys() == expected.keys(), f"{name}: {stored.keys() ^ expected.keys()}"
    for key, value in expected.items():
        torch.testing.assert_close(stored[key], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")
    again = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base(), where))
    assert all(torch.equal(again[key], value) for key, value in stored.items())


def test_only_the_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    spawn(check_adapters, 2, folder=tmp_path)
