"""A GPT with tied embedding and head, trained in a pipeline through ``initialize``, equals the serial one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import parametrize_sample, spawn
from tests.titans.test_pipeline import GPT_SIZES, whole
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT
from titans.model.pipeline_gpt import build_gpt_pipeline

DEPTH, STEPS, CLIP = 4, 5, 0.5


def train_serially(model: nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = GPTLMLoss()(model(ids), ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(rank: int, world_size: int, port: int, plan: dict[str, Any], chunks: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    serial = GPT(depth=DEPTH, **GPT_SIZES)
    ids = torch.randint(GPT_SIZES["vocab_size"], (8, 8))
    expected = train_serially(serial, ids)
    config: dict[str, Any] = {"parallel": plan, "NUM_MICRO_BATCHES": 4, "clip_grad_norm": CLIP}
    if chunks > 1:
        config["model"] = {"num_chunks": chunks}
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = build_gpt_pipeline(DEPTH, chunks, **GPT_SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, GPTLMLoss(), verbose=False)
    engine.train()
    for step in range(STEPS):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([({"input_ids": ids}, ids)]), return_output_label=False)
        engine.step()
        if loss is not None:
            assert loss.item() == pytest.approx(expected[step], rel=1e-5)
    trained = {**dict(serial.named_parameters()), "head.dense.weight": serial.head.dense.weight}
    for part in model if chunks > 1 else [model]:  # type: ignore[union-attr]
        for name, p in part.named_parameters():
            torch.testing.assert_close(whole(p, p), trained[name].detach(), rtol=1e-4, atol=1e-5)
    gpc.destroy()


PLANS: list[tuple[int, dict[str, Any], int]] = [
    (4, {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 1),
    (4, {"pipeline": 4}, 1),
    (2, {"pipeline": 2}, 2),
    (2, {"pipeline": {"size": 2, "schedule": "zbv"}}, 2),  # both ends of the model on the first rank
    (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, 1),
    (4, {"pipeline": 2}, 1),  # and 2 data-parallel ranks with the same batch
]


@parametrize_sample("nprocs, plan, chunks", PLANS, n=4)
def test_tied_gpt_trains_as_the_serial_one(nprocs: int, plan: dict[str, Any], chunks: int) -> None:
    spawn(check, nprocs, plan=plan, chunks=chunks)
