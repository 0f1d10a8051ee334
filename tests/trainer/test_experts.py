"""The loads of experts in the logs, in files of metrics, and as a picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.engine import Engine
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import FFNExperts, LoadHistory, MoeLayer, Top2Router, draw_loads, load_table
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoeLayer(8, 4, Top2Router(1.0), FFNExperts(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Residual(), Residual())


def batches(samples: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(samples, 5, 8), torch.zeros(samples, 5, 8)) for _ in range(3)]


def test_loads_of_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = model()
    engine = Engine(layers, torch.optim.SGD(layers.parameters(), lr=0.1), MoeLoss(0.1, nn.MSELoss))
    picture, file = tmp_path / "pictures" / "loads.png", tmp_path / "metrics.jsonl"
    wanted = [hooks.LossHook(), hooks.ExpertLoadHook(picture), hooks.JSONLinesHook(file)]
    Trainer(engine).fit(batches(4), epochs=2, hooks=wanted)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len([line for line in lines if "0.moe load/train" in line]) == 6
    for line in lines:
        assert 1 <= line["0.moe load/train"] <= 4
        assert 0 <= line["1.moe dropped/train"] < 1
        assert 0 < line["1.moe entropy/train"] <= 1.3863
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_history_adds_up_micro_batches() -> None:
    layers = model()
    history = LoadHistory(layers)
    for x, _ in batches(2)[:2]:
        layers(x)
    history.step()
    layers.eval()
    layers(x)  # not trained
    history.step()
    loads = history.layers["1.moe"]
    assert [sum(tokens) for tokens in loads.tokens] == [2 * 2 * 10]  # micro-batches, choices, tokens
    assert load_table(history.layers).count("load max/mean") == 2
    history.close()
    with pytest.raises(ValueError, match="Linear has no router"):
        LoadHistory(nn.Linear(2, 2))


def test_a_history_forgets_old_steps(tmp_path: Path) -> None:
    layers = model()
    history = LoadHistory(layers, keep=3)
    for step in range(5):
        for x, _ in batches(2)[: 1 + step]:
            layers(x)
        history.step()
    loads = history.layers["1.moe"]
    assert [sum(tokens) for tokens in loads.tokens] == [60, 60, 60]  # of 20, 40, 60, 60, 60
    assert (loads.forgotten, len(loads.dropped), len(loads.entropy)) == (2, 3, 3)
    draw_loads(tmp_path / "loads.png", history.layers)
    with pytest.raises(ValueError, match="keep=0"):
        hooks.ExpertLoadHook(keep=0)


def _ranks(folder: str, **place: Any) -> None:
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}, verbose=False)
    stage = model()[place["rank"]]
    engine, *_ = colossalai.initialize(
        stage, torch.optim.SGD(stage.parameters(), lr=0.1), MoeLoss(0.1, nn.MSELoss), verbose=False
    )
    picture = Path(folder) / "loads.png"
    hook = hooks.ExpertLoadHook(picture)
    Trainer(engine).fit(batches(4), epochs=1, hooks=[hooks.LossHook(), hook])
    assert list(hook._of_all_stages()) == ["stage 0: moe", "stage 1: moe"]
    assert place["rank"] or picture.is_file()


def test_stages_tell_each_other(tmp_path: Path) -> None:
    spawn(partial(_ranks, str(tmp_path)), 2)
