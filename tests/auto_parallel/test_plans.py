"""Models that ``auto_checkpoint`` has changed, under DDP, ZeRO, Gemini and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint import CheckpointPlanner
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.launchers import launch_from_torch
from colossalai.nn import parallelize
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import assert_close, spawn
from tests.auto_parallel.models import IDS, gpt2

PLUGINS: dict[str, Any] = {
    "ddp": TorchDDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32", placement_policy="cpu"),
}


def changed(model: nn.Module, ids: Tensor) -> nn.Module:
    """With modes of all kinds."""
    planner = CheckpointPlanner(model, {"input_ids": ids, "labels": ids}, device="h200")
    plan = planner.plan((2 * planner.least[2] + planner.whole) // 3)
    planner.apply(plan)
    assert len(set(plan.modes.values())) > 1
    return model


def _plugins(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({}, backend="gloo")
    ids = IDS.roll(rank, 1)
    for plugin in PLUGINS.values():
        found = []
        for plain in (True, False):
            torch.manual_seed(0)
            model = gpt2(dropout=0.0).train()
            model = model if plain else changed(model, ids)
            booster = Booster(plugin=plugin())
            boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
            losses = []
            for _ in range(3):
                loss = boosted(input_ids=ids, labels=ids).loss
                booster.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().float())
            found.append(losses)
        for a, b in zip(*found, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_with_booster() -> None:
    spawn(_plugins, 2)


def _cut(rank: int, world_size: int, port: int) -> None:
    launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, backend="gloo")
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = parallelize(gpt2())
        model = model if plain else changed(model, IDS)
        torch.manual_seed(1)
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_with_tensor_parallelism() -> None:
    """The budget is that of a rank, and ranks choose alike."""
    spawn(_cut, 2)
