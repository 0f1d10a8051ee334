"""``GeminiPlugin``: parity through the booster, checkpoints at other numbers of ranks and for serial runs,
refusals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from tests.booster.plans import batches, launch, loss_of, mlp

SMALL = {"min_chunk_size_mb": 64 * 4 / 1024**2, "search_range_mb": 64 * 4 / 1024**2}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def _boost(**options: Any) -> tuple[Booster, nn.Module, Any]:
    torch.manual_seed(0)
    model = mlp()
    booster = Booster(plugin=GeminiPlugin(device="cpu", precision="fp32", **{**SMALL, **options}))
    boosted, optimizer, *_ = booster.boost(model, _adam(model))
    return booster, boosted, optimizer


def _train(booster: Booster, model: nn.Module, optimizer: Any, steps: range, rank: int, ranks: int) -> float:
    last = 0.0
    for words, labels in batches([8] * steps.stop)[steps.start :]:
        part = (words.chunk(ranks)[rank], labels.chunk(ranks)[rank])
        loss = loss_of(model, part)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
    return last


def _serial(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = mlp()
    optimizer = _adam(model)
    for batch in batches([8] * steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _save(rank: int, world_size: int, port: int, folder: Path, shard: bool) -> None:
    launch(rank, world_size, port)
    booster, model, optimizer = _boost(placement_policy="cpu", update_in_backward=True)
    _train(booster, model, optimizer, range(2), rank, world_size)
    booster.save_model(model, folder / "model", shard=shard)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=shard)


def _load(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    expected = _serial(4).state_dict()
    booster, model, optimizer = _boost(placement_policy="auto")
    _train(booster, model, optimizer, range(1), rank, world_size)  # something else, to be forgotten
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    _train(booster, model, optimizer, range(2, 4), rank, world_size)
    weights = model.state_dict(only_rank_0=False)
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-5), name


def _load_serially(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    torch.manual_seed(1)
    model = mlp()
    booster = Booster(device="cpu", plugin=TorchDDPPlugin())
    model, optimizer, *_ = booster.boost(model, _adam(model))
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    _train(booster, model, optimizer, range(2, 4), rank, world_size)
    for name, tensor in _serial(4).state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("shard", [False, True])
def test_checkpoints_at_any_number_of_ranks(shard: bool, tmp_path: Path) -> None:
    spawn(_save, 2, folder=tmp_path, shard=shard)
    spawn(_load, 4 if shard else 1, folder=tmp_path)
    spawn(_load_serially, 1, folder=tmp_path)


def _refusals(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    with pytest.raises(
        ValueError, match="there is no placement policy 'gpu'; there are 'cpu', 'cuda', 'auto', 'const'"
    ):
        GeminiPlugin(placement_policy="gpu")
    with pytest.raises(ValueError, match="precision as one of fp16, bf16, fp32, got 'int8'"):
        GeminiPlugin(precision="int8")
    plugin = GeminiPlugin(device="cpu")
    with pytest.raises(
        TypeError, match=r"no_sync needs the model that booster.boost returned under GeminiPlugin, got Linear"
    ):
        plugin.no_sync(nn.Linear(1, 1))


def test_refusals() -> None:
    spawn(_refusals, 1)


def _on_trial(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    found = []
    for ratio in (1.0, 0.0):
        booster, model, optimizer = _boost(max_norm=100.0, update_in_backward=True, undo_ratio=ratio)
        _train(booster, model, optimizer, range(4), rank, world_size)
        numbers = model.gemini_manager.timeline.numbers()
        found.append((numbers.tried + numbers.undone, model.state_dict(only_rank_0=False)))
        assert (optimizer._speculative is None) == (ratio == 0)
    assert found[1][0] == 0
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_updates_in_the_backward_pass_with_clipping() -> None:
    spawn(_on_trial, 1)
