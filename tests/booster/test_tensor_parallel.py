"""A booster in a job whose ranks share models: replicas are the data-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import colossalai
import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.mesh import unshard
from colossalai.nn.modes import current
from colossalai.testing import spawn


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(col_nn.Linear(8, 16), nn.ReLU(), col_nn.Linear(16, 8))


def _train(rank: int, world_size: int, port: int, folder: str) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(8.0)), batch_size=2)
    seen = torch.cat([batch for (batch,) in loader]).tolist()
    replica = gpc.get_local_rank(ParallelMode.DATA)
    assert seen == [n for n in range(8) if n % 2 == replica]
    model, _, booster = _model(), None, Booster(device="cpu", plugin=plugin)
    before = [p.detach().clone() for p in model.parameters()]
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, raw)
    assert all(torch.equal(a, b) for a, b in zip(before, boosted.parameters(), strict=True))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    booster.backward(boosted(x[2 * replica : 2 * replica + 2]).square().mean(), optimizer)
    serial = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    mesh = current().mesh
    assert mesh is not None
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
            theirs.copy_(unshard(mine, mine.placement, mesh))
    serial(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(unshard(mine.grad, mine.placement, mesh), theirs.grad)
    booster.save_model(boosted, Path(folder) / "model.bin")  # whole tensors, as the serial model has them
    saved = torch.load(Path(folder) / "model.bin", weights_only=True)
    torch.testing.assert_close(saved, dict(serial.state_dict()), rtol=0, atol=0)


def test_replicas_are_the_data_parallel_ranks(tmp_path: Path) -> None:
    spawn(_train, 4, folder=str(tmp_path))


class Centered(torch.optim.SGD):
    """An optimizer of a script's own, of which nothing is known."""


class Declared(torch.optim.SGD):
    """One that says what it is."""

    elementwise = True


def _refuse_far_sighted(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    cases = {
        "LBFGS": "LBFGS looks at the gradients of the whole model",
        "Adafactor": "Adafactor may look at whole matrices, .* such as AdamW$",
        "Centered": "Centered may look at whole matrices, .* say so by elementwise = True in its class",
    }
    for name, words in cases.items():
        model = _model()
        kind = Centered if name == "Centered" else getattr(torch.optim, name)
        with pytest.raises(ValueError, match=words):
            Booster(device="cpu").boost(model, kind(model.parameters(), lr=0.1))
    Booster(device="cpu").boost(model := _model(), Declared(model.parameters(), lr=0.1))
    plain = nn.Linear(4, 4)
    Booster(device="cpu").boost(plain, torch.optim.Adafactor(plain.parameters(), lr=0.1))


def test_optimizers_that_look_at_more_than_a_piece_are_refused() -> None:
    spawn(_refuse_far_sighted, 2)
