"""A model generates in the middle of its training, with the weights of then, and trains on as if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.inference import Generator, Sampling
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from tests.inference.models import WORDS, build, greedy, prompts

PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "ddp": ({}, 2),
    "zero1": ({}, 2),
    "zero2": ({}, 2),
    "1d": ({"tensor": {"size": 2, "mode": "1d"}}, 2),
    "pipeline": ({"pipeline": 2}, 2),
    "fsdp": ({}, 2),
    "gemini": ({}, 2),
    "1d and zero2": ({"tensor": {"size": 2, "mode": "1d"}}, 4),
}
STEPS, COUNT = 3, 8


def _plugin(plan: str) -> Plugin | None:
    if "zero" in plan:
        return LowLevelZeroPlugin(stage=int(plan[-1]), precision="fp32")
    if plan == "fsdp":
        return TorchFSDPPlugin()
    if plan == "gemini":
        return GeminiPlugin(
            precision="fp32", placement_policy="cpu", search_range_mb=0.1, min_chunk_size_mb=0.01
        )
    return TorchDDPPlugin() if plan == "ddp" else None


def batch(step: int, replica: int) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(10 * step + replica)
    ids = torch.randint(2, WORDS, (4, 12), generator=numbers)
    return {"input_ids": ids, "labels": ids}


def train(rank: int, world_size: int, port: int, plan: str, folder: Path, writes: bool) -> Any:
    parallel, _ = PLANS[plan]
    config = {"parallel": parallel, "NUM_MICRO_BATCHES": 2}
    colossalai.launch(config, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    model = build("llama").train()
    if "1d" in plan:
        model = parallelize(model)
    elif plan == "pipeline":
        model = split_model(model)
    booster = Booster(plugin=_plugin(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, *_ = booster.boost(model, optimizer)
    generator = Generator(model, page_size=4) if writes else None
    written = []
    replica = rank // 2 if "and" in plan else rank if parallel == {} else 0
    for step in range(STEPS):
        given = batch(step, replica)
        if plan == "pipeline":
            booster.execute_pipeline(iter([given]), model, None, optimizer)
        else:
            booster.backward(model(**given).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if generator is not None:
            asked = Sampling(max_tokens=COUNT + replica, temperature=0)  # replicas need not go in step
            written.append([c.tokens for c in generator.generate(prompts()[replica:], asked)])
            if plan in ("fsdp", "gemini"):
                with pytest.raises(RuntimeError, match="whole for the time of a call of generate"):
                    generator.submit([5])
            colossalai.save_pretrained(model, folder / str(step))
    if generator is None:
        colossalai.save_pretrained(model, folder / "alone")
    return replica, written


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=pytest.mark.slow if p in ("zero1", "1d", "zero2") else ()) for p in PLANS]
)
def test_it_generates_between_steps(plan: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    ranks = PLANS[plan][1]
    found = spawn(train, ranks, plan=plan, folder=tmp_path, writes=True)
    spawn(train, ranks, plan=plan, folder=tmp_path, writes=False)
    last, alone = (load_file(tmp_path / name / "model.safetensors") for name in (str(STEPS - 1), "alone"))
    assert last.keys() == alone.keys()
    assert all(torch.equal(last[name], alone[name]) for name in last), "it trained on as if nothing happened"
    for step in range(STEPS):
        model = LlamaForCausalLM.from_pretrained(tmp_path / str(step))
        for replica, written in found:
            assert written[step] == [greedy(model, p, COUNT + replica) for p in prompts()[replica:]]
