"""On a real GPU, what tensors need at the worst moment of a step is what was predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Adam

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.dry_run import Parts, dry_run
from colossalai.testing import spawn
from titans.loss.lm_loss import GPTLMLoss
from titans.model.gpt import GPT

CONFIG: dict[str, Any] = {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 1}}


def build() -> Parts:
    model = GPT(vocab_size=32000, hidden_size=1024, num_heads=16, depth=8)  # with dropout
    ids = torch.zeros(4, 1024, dtype=torch.long)
    return Parts(model, Adam(model.parameters(), weight_decay=1e-2), GPTLMLoss(), ({"input_ids": ids}, ids))


def measure(rank: int, world_size: int, port: int) -> int:
    colossalai.launch_from_torch(config=CONFIG, verbose=False)
    model, optimizer, criterion, batch = build()
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    for _ in range(3):
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine.step()
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_prediction_on_a_gpu() -> None:
    (measured,) = spawn(measure, 1, timeout=120)
    (report,) = dry_run(CONFIG, 1, build)
    assert report.memory.peak == pytest.approx(measured, rel=0.1)
