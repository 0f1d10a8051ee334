"""A model on a mesh of its own, in a job that was launched without a plan: nobody takes its ranks for
replicas.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.mesh import Layout, Mesh, parameter, place, redistribute, replicated, serial_tensor
from colossalai.mesh.parameter import OWN_MESH
from colossalai.testing import spawn
from colossalai.utils import clip_grad_norm_fp32

_ROWS, _COLUMNS = Layout((("0",), ())), Layout(((), ("0",)))


def _serial() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


class _Cut(nn.Sequential):
    """The two layers, of which ranks hold columns and rows."""

    def __init__(self, serial: nn.Sequential, mesh: Mesh) -> None:
        super().__init__(*serial)
        self.mesh = mesh
        layouts = {"0.weight": _ROWS, "0.bias": Layout((("0",),)), "1.weight": _COLUMNS}
        for name, old in list(self.named_parameters()):
            path, _, attribute = name.rpartition(".")
            layout = layouts.get(name, replicated(old.ndim))
            new = parameter(old, layout, mesh)
            place(new, layout, old.shape, mesh=mesh)
            setattr(self.get_submodule(path), attribute, new)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self[0], self[1]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        x = redistribute(x, replicated(2), Layout(((), ()), spread=frozenset("0")), self.mesh)
        hidden = nn.functional.linear(x, first.weight, first.bias)
        part = nn.functional.linear(hidden, second.weight)
        return (
            redistribute(part, Layout(((), ()), partial=frozenset("0")), replicated(2), self.mesh)
            + second.bias
        )


def _check(model: nn.Module, serial: nn.Module, what: str = "data") -> None:
    for (name, mine), theirs in zip(model.named_parameters(), serial.parameters(), strict=True):
        value = mine.grad if what == "grad" else mine.detach()
        whole = serial_tensor(value, mine, getattr(mine, OWN_MESH))
        torch.testing.assert_close(
            whole, theirs.grad if what == "grad" else theirs.detach(), msg=lambda m, n=name: n + m
        )


def _train(rank: int, world_size: int, port: int, folder: str) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    mesh, x = Mesh({"0": 2}), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for plugin in (None, TorchDDPPlugin()):
        _boosted(plugin, mesh, x, Path(folder) / str(plugin is None))
    _engine(mesh, x)
    model = _Cut(_serial(), mesh)
    with pytest.raises(ValueError, match="has chosen for every weight where it lies"):
        Booster(plugin=LowLevelZeroPlugin(stage=2)).boost(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="LBFGS"):
        Booster().boost(model, torch.optim.LBFGS(model.parameters()))


def _boosted(plugin: TorchDDPPlugin | None, mesh: Mesh, x: torch.Tensor, folder: Path) -> None:
    serial, model = _serial(), _Cut(_serial(), mesh)
    theirs = torch.optim.AdamW(serial.parameters(), lr=0.1)
    booster = Booster(device="cpu", plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    _check(model, serial)  # nobody has got the piece of another
    for step in range(2):
        serial(x).square().sum().backward()
        booster.backward(boosted(x).square().sum(), optimizer)
        _check(model, serial, "grad")
        limit = 0.5 * float(nn.utils.clip_grad_norm_(serial.parameters(), 1e9))
        norms = [nn.utils.clip_grad_norm_(serial.parameters(), limit), optimizer.clip_grad_by_norm(limit)]
        torch.testing.assert_close(norms[0].float(), norms[1].float())
        assert abs(clip_grad_norm_fp32(model.parameters(), 1e9) - limit) < 1e-4
        theirs.step()
        optimizer.step()
        theirs.zero_grad()
        optimizer.zero_grad()
        if step == 0:
            booster.save(folder / "run")
            booster.save_model(boosted, folder / "model.bin")
    _check(model, serial)
    saved = torch.load(folder / "model.bin", weights_only=True)
    assert {name: tuple(t.shape) for name, t in saved.items()} == {
        name: tuple(t.shape) for name, t in serial.state_dict().items()
    }
    booster.load(folder / "run")
    booster.backward(boosted(x).square().sum(), optimizer)
    optimizer.clip_grad_by_norm(limit)
    optimizer.step()
    _check(model, serial)  # as the first time
    booster.load_model(boosted, folder / "model.bin")
    for name, mine in model.named_parameters():
        assert torch.equal(serial_tensor(mine.detach(), mine, mesh), saved[name])


def _engine(mesh: Mesh, x: torch.Tensor) -> None:
    serial, model = _serial(), _Cut(_serial(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
    _check(model, serial)
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), torch.zeros(3, 4)))
    nn.MSELoss()(serial(x), torch.zeros(3, 4)).backward()
    _check(model, serial, "grad")
    engine.step()


def test_a_model_on_a_mesh_of_its_own_has_no_replicas(tmp_path: Path) -> None:
    spawn(_train, 2, folder=str(tmp_path))
