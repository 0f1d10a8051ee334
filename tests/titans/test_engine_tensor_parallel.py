"""GPT in 1D and 2D under ``colossalai.initialize``, with two replicas and clipped gradients, trains like the
serial GPT.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
from colossalai.nn.metric import Accuracy
from colossalai.testing import spawn
from titans.model.gpt import GPT, GPTLMLoss

WORDS, ROWS, STEPS, CLIP = 2053, 8, 4, 0.5


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(WORDS, 8, 16, 4, 2, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)


def data() -> torch.Tensor:
    return torch.randint(WORDS, (STEPS, ROWS, 8), generator=torch.Generator().manual_seed(1))


def serial() -> list[float]:
    model, loss_fn = build(), GPTLMLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for batch in data():
        loss = loss_fn(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(rank: int, world_size: int, port: int, tensor: dict[str, Any], amp: bool) -> None:
    torch.set_num_threads(1)
    expected = serial()
    config: dict[str, Any] = {"parallel": {"tensor": tensor}, "clip_grad_norm": CLIP}
    if amp:
        config["fp16"] = {"mode": AMP_TYPE.NAIVE, "initial_scale": 2**8}
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)
    model = build().cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    replicas, mine = gpc.data_parallel_size, gpc.mesh.coord["dp"]
    loader = DataLoader(list(data().chunk(replicas, dim=1)[mine].flatten(0, 1)), batch_size=ROWS // replicas)
    engine, loader, *_ = colossalai.initialize(model, optimizer, GPTLMLoss(), loader, verbose=False)
    engine.train()
    losses = []
    for batch in loader:
        engine.zero_grad()
        output = engine(batch)
        loss = engine.criterion(output, batch)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / world_size)
    assert losses == pytest.approx(expected, rel=1e-2 if amp else 1e-5)
    correct = Accuracy()(output.detach(), batch)
    assert 0 <= int(correct) <= batch.numel()


@pytest.mark.parametrize(
    ("tensor", "amp"),
    [
        ({"size": 2, "mode": "1d"}, False),
        ({"size": 4, "mode": "2d"}, False),
        ({"size": 2, "mode": "1d"}, True),
    ],
    ids=["1d", "2d", "1d-fp16"],
)
def test_engine(tensor: dict[str, Any], amp: bool) -> None:
    spawn(_train, 2 * tensor["size"], tensor=tensor, amp=amp, timeout=120)
