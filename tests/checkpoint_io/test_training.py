"""One file with everything a run needs to go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossalai.mesh import Layout, place
from colossalai.testing import assert_equal
from colossalai.utils import load_checkpoint, save_checkpoint


def test_all_parts_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    file = tmp_path / "new" / "all.pt"
    save_checkpoint(file, 7, model, optimizer, scheduler, note="mine")
    assert torch.load(file, weights_only=True)["note"] == "mine"

    other = nn.Linear(2, 2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other_scheduler = StepLR(other_optimizer, 1)
    assert load_checkpoint(file, other, other_optimizer, other_scheduler) == 7
    assert_equal(other.weight, model.weight)
    assert_equal(other_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert other_scheduler.get_last_lr() == pytest.approx([0.01])


def test_a_model_in_pieces_needs_a_mesh(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    place(model.weight, Layout((("tp",), ())), (4, 2))
    with pytest.raises(
        ValueError, match=r"model/weight is cut as \[tp, -\], but no mesh says over which ranks"
    ):
        save_checkpoint(tmp_path / "x.pt", 0, model)


def test_an_optimizer_of_more_than_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(tmp_path / "x.pt", 0, model[0], optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    load_checkpoint(tmp_path / "x.pt", model[0], optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    model = nn.Linear(2, 2)
    save_checkpoint(file, 0, model)
    with pytest.raises(RuntimeError, match=r"is not a checkpoint with optimizer; it holds epoch, model"):
        load_checkpoint(file, model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(RuntimeError, match=r"model\.pt does not fit the model: size mismatch for weight"):
        load_checkpoint(file, nn.BatchNorm1d(2))
    with pytest.raises(RuntimeError, match=r"model\.pt does not fit the model: Error"):
        load_checkpoint(file, nn.Sequential(model))
    load_checkpoint(file, nn.Sequential(), strict=False)
    torch.save({"weight": torch.ones(1)}, file)
    with pytest.raises(RuntimeError, match="is not a checkpoint with model; it holds weight"):
        load_checkpoint(file, model)


def test_an_optimizer_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", 3, model, optimizer)
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    for own, refusal in (
        (torch.optim.AdamW(nn.Linear(3, 2).parameters()), "other parameters: exp_avg of parameter 0"),
        (torch.optim.SGD(other.parameters(), lr=0.1), "another kind of optimizer"),
    ):
        with pytest.raises(
            ValueError, match=rf"c\.pt does not fit the optimizer: the saved state is of {refusal}"
        ):
            load_checkpoint(tmp_path / "c.pt", other, own)
        assert torch.equal(other.weight, before)


def test_a_compiled_model_keeps_its_names(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c.pt", 3, torch.compile(model, backend="eager"))
    load_checkpoint(tmp_path / "c.pt", other)
    assert torch.equal(model.weight, other.weight)
