"""Parameters that are not contiguous in memory: every plugin trains, saves and loads them like others.

Those in one memory are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.mesh.parameter import overlapping
from colossalai.testing import assert_close, spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.booster.plans import launch

PLUGINS: list[Callable[[], Plugin]] = [
    TorchDDPPlugin,
    TorchFSDPPlugin,
    lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    lambda: GeminiPlugin("cpu", precision="fp32"),
]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def _train(booster: Booster | None, folder: Path | None) -> dict[str, Tensor]:
    model: nn.Module = Turned()
    # its states are made at once, with the strides of the parameter
    optimizer: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    if booster is not None:
        model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(3):
        loss = model(torch.ones(2, 6) + step).square().mean()
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if booster is not None and folder is not None and step == 0:
            booster.save(folder / "run")
            booster.load(folder / "run")
            save_checkpoint(folder / "file.pt", 0, model, optimizer)
            load_checkpoint(folder / "file.pt", model, optimizer)
    if booster is not None and folder is not None:
        booster.save_model(model, folder / "end.pt")
        return torch.load(folder / "end.pt")
    return model.state_dict()


def _all_plugins(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    expected = _train(None, None)
    for number, plugin in enumerate(PLUGINS):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        made = plugin()
        found = _train(Booster(None if isinstance(made, GeminiPlugin) else "cpu", plugin=made), own)
        assert_close(found["matrix"].contiguous(), expected["matrix"].contiguous())


@pytest.mark.parametrize("ranks", [1, 2])
def test_strides(ranks: int, tmp_path: Path) -> None:
    spawn(_all_plugins, ranks, folder=tmp_path)


class Views(nn.Module):
    """A matrix, and a parameter that is a view of it."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(5, 7))
        self.view = nn.Parameter(view(self.whole.detach()))


OVERLAPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda whole: whole,
    "rows": lambda whole: whole[3:],
    "turned": lambda whole: whole.t(),
    "columns": lambda whole: whole[:, 3:],
}


def _one_memory(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for plugin in PLUGINS:
        made = plugin()
        booster = Booster(None if isinstance(made, GeminiPlugin) else "cpu", plugin=made)
        for view in OVERLAPPING.values():
            model = Views(view)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if isinstance(made, TorchDDPPlugin):
                booster.boost(model, optimizer)
                continue
            words = (
                rf"(whole and view|view and whole) lie in the same memory, and {type(made).__name__} would"
            )
            with pytest.raises(ValueError, match=words):
                booster.boost(model, optimizer)


def test_parameters_in_one_memory_are_refused_where_they_would_be_moved() -> None:
    spawn(_one_memory, 2)


def test_parameters_that_only_lie_side_by_side_do_not_overlap() -> None:
    matrix = torch.ones(5, 7)
    parts = [matrix[:2], matrix[2:, :3], matrix[2:, 3:], torch.ones(5, 7).t(), torch.ones(1).expand(3)]
    named = [(str(i), nn.Parameter(part)) for i, part in enumerate(parts)]
    assert overlapping(named) is None
    assert overlapping([*named, ("column", nn.Parameter(matrix[:2, 3]))]) == ("0", "column")
    assert overlapping([("no memory", nn.Parameter(torch.empty(3, device="meta")))] * 2) is None
