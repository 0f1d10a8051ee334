"""Models that torch.compile wrapped, before boost or after: the names are the user's, and gradients can
accumulate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.checkpoint_io.files.state_file import load_shard_state_dict
from colossalai.testing import spawn
from tests.booster.plans import mlp


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _train_and_save(when: str, plugin: Any, path: Path) -> None:
    torch.manual_seed(0)
    raw = mlp()
    names = list(raw.state_dict())
    model = _compiled(raw) if when == "before" else raw
    booster = Booster(device="cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    model = _compiled(model) if when == "after" else model
    assert model.unwrap() is raw
    with booster.no_sync(model):
        booster.backward(model(torch.ones(4, 6)).sum(), optimizer)
    booster.backward(model(torch.ones(4, 6)).sum(), optimizer)
    optimizer.step()
    for shard in (False, True):
        target = path.with_name(f"{path.name}{shard}")
        booster.save_model(model, target, shard=shard)
        plain = mlp()
        Booster(device="cpu").load_model(plain, target)  # into a plain model
        booster.load_model(model, target)
        loaded = list(model.parameters())
        for ours, own in zip(loaded, plain.parameters(), strict=True):
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            assert torch.equal(whole, own)
    assert list(load_shard_state_dict(path.with_name(f"{path.name}False"))) == names
    with pytest.raises(RuntimeError, match="was boosted before"):
        booster.boost(model if when == "after" else _compiled(raw))


def _parallel(rank: int, world_size: int, port: int, folder: Path) -> None:
    colossalai.launch({}, rank, world_size, "localhost", port, "gloo", verbose=False)
    for plugin in (TorchDDPPlugin, TorchFSDPPlugin):
        for when in ("before", "after"):
            _train_and_save(when, plugin(), folder / f"{plugin.__name__}-{when}")


@pytest.mark.parametrize("when", ["before", "after"])
def test_serially(when: str, tmp_path: Path) -> None:
    _train_and_save(when, None, tmp_path / "model")


def test_under_data_parallelism(tmp_path: Path) -> None:
    spawn(_parallel, 2, folder=tmp_path)


def test_the_plainest_boosted_model_has_unwrap() -> None:
    raw = nn.Linear(2, 2)
    model = Booster(device="cpu").boost(raw).model
    assert model.unwrap() is raw
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model.in_features == 2
