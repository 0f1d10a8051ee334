"""What booster.save and booster.load refuse, and say about it, before anything is changed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.checkpoint_io.runs.writing import LOCK, Lock
from colossalai.nn.optimizer import CPUAdam, HybridAdam, Lamb
from colossalai.testing import spawn
from tests.booster.plans import launch


def job(
    model: nn.Module | None = None, make: Callable[..., Optimizer] = torch.optim.AdamW, **booster: Any
) -> tuple[Booster, nn.Module]:
    model = nn.Linear(4, 4) if model is None else model
    boost = Booster("cpu", **booster)
    boosted = boost.boost(model, make(model.parameters(), lr=1e-2))
    boost.backward(boosted.model(torch.ones(2, 4)).square().sum(), boosted.optimizer)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    return boost, boosted.model


class Own(torch.optim.AdamW):
    """Somebody's optimizer."""


@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.optim.AdamW, HybridAdam), (CPUAdam, torch.optim.Adam), (Own, HybridAdam)]
)
def test_optimizers_that_keep_the_same_states_read_each_other(
    saved: Callable[..., Optimizer], loaded: Callable[..., Optimizer], tmp_path: Path
) -> None:
    job(make=saved)[0].save(tmp_path / "c")
    job(make=loaded)[0].load(tmp_path / "c")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.optim.Adamax, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.NAdam),
        (torch.optim.RAdam, torch.optim.Adamax),
        (torch.optim.Adam, Lamb),
    ],
)
def test_other_optimizers_are_refused(
    saved: Callable[..., Optimizer], loaded: Callable[..., Optimizer], tmp_path: Path
) -> None:
    job(make=saved)[0].save(tmp_path / "c")
    booster, model = job(make=loaded)
    before = model.weight.detach().clone()
    own, other = saved.__name__, loaded.__name__
    message = (
        rf"{tmp_path / 'c'} does not fit: the saved states are those of {own}, and the optimizer is {other}"
    )
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            booster.load(tmp_path / "c", strict=strict)
    assert torch.equal(model.weight, before)


def _on_all_ranks(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch(rank, world_size, port)
    job(plugin=TorchFSDPPlugin())[0].save(folder / "c")
    booster, _ = job(make=torch.optim.NAdam, plugin=TorchFSDPPlugin())
    with pytest.raises(RuntimeError, match=r"those of AdamW, and the optimizer is NAdam"):
        booster.load(folder)


def test_another_optimizer_is_refused_on_every_rank(tmp_path: Path) -> None:
    spawn(_on_all_ranks, 2, folder=tmp_path)


class Expanded(nn.Linear):
    def __init__(self, copy: bool = False) -> None:
        super().__init__(4, 4)
        buffer = torch.full((1,), 3.0).expand(4)
        self.register_buffer("rate", buffer.clone() if copy else buffer)


def test_expanded_buffers_are_refused_before_a_weight_changes(tmp_path: Path) -> None:
    booster, model = job(Expanded())
    booster.save(tmp_path / "c")
    booster.save_model(model, tmp_path / "w.bin")
    other, target = job(Expanded())
    before = target.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"model/rate cannot be loaded: .* made by expand\); .*\.clone\(\)"
    ):
        other.load(tmp_path / "c")
    with pytest.raises(RuntimeError, match=r"rate is a buffer made by expand.*\.clone\(\)"):
        other.load_model(target, tmp_path / "w.bin")
    assert torch.equal(target.weight, before)
    again, target = job(Expanded(copy=True))  # the checkpoint itself is whole
    again.load(tmp_path / "c")
    assert torch.equal(target.weight, model.weight)
    assert torch.equal(target.rate, torch.full((4,), 3.0))


def test_a_folder_is_saved_to_by_one_job_at_a_time(tmp_path: Path) -> None:
    booster, _ = job()
    booster.save(tmp_path / "c", {"step": 1})
    other = Lock()
    other.take(tmp_path / "c")
    before = sorted(p.name for p in (tmp_path / "c").iterdir())
    for background in (False, True):
        message = rf"c is being saved to by another job \(process {os.getpid()} on {socket.gethostname()}\)"
        with pytest.raises(RuntimeError, match=message):
            booster.save(tmp_path / "c", {"step": 2}, background=background)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == before
    booster.save(tmp_path / "d")  # another folder is free
    assert booster.load(tmp_path / "c") == {"step": 1}
    other.release()
    booster.save(tmp_path / "c", {"step": 2}, background=True).wait()
    assert not (tmp_path / "c" / LOCK).exists()
    assert booster.load(tmp_path / "c") == {"step": 2}


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    booster, _ = job()
    booster.save(tmp_path / "c")
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    said = json.dumps({"host": socket.gethostname(), "pid": gone})
    (tmp_path / "c" / LOCK).write_text(said)  # of a process that was killed
    booster.save(tmp_path / "c", {"step": 2})
    orphan = Lock()  # a worker of it lives on, and has the lock
    orphan.take(tmp_path / "c")
    (tmp_path / "c" / LOCK).write_text(said)
    booster.save(tmp_path / "c", {"step": 3})
    assert booster.load(tmp_path / "c") == {"step": 3}
    orphan.release()


def test_a_save_that_fails_gives_its_lock_back(tmp_path: Path) -> None:
    booster, _ = job()
    with pytest.raises(TypeError, match=r"extra\.x is a object"):
        booster.save(tmp_path / "c", {"x": object()})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"a checkpoint is a folder, but .*file is a file"):
        booster.save(tmp_path / "file")
    booster.save(tmp_path / "c")
    assert not (tmp_path / "c" / LOCK).exists()


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_path_that_is_none(path: Any) -> None:
    booster, _ = job()
    for call in (booster.save, booster.load):
        with pytest.raises(
            ValueError, match=rf"take the folder of the checkpoint, a str or Path; got {path!r}"
        ):
            call(path)


def test_extra_must_be_a_dict_and_keeps_its_order(tmp_path: Path) -> None:
    booster, _ = job()
    with pytest.raises(
        TypeError, match=r"takes extra, a dict of further values, after the path; got \[1, 2\]"
    ):
        booster.save(tmp_path / "c", [1, 2])  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()
    extra = {"z": 1, "a": {"y": 2, "b": 3}, "m": 4}
    booster.save(tmp_path / "c", extra)
    found = booster.load(tmp_path / "c")
    assert json.dumps(found) == json.dumps(extra)


def test_loading_nothing_at_all_is_refused(tmp_path: Path) -> None:
    job()[0].save(tmp_path / "c")
    other, model = job(nn.Sequential(nn.Linear(4, 4)))
    before = model.state_dict()["0.weight"].clone()
    with pytest.raises(
        RuntimeError, match=r"nothing of .*c fits the model: it has model/weight, .* the model model/0"
    ):
        other.load(tmp_path / "c", strict=False)
    assert torch.equal(model.state_dict()["0.weight"], before)
    partly, _ = job(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    job(nn.Sequential(nn.Linear(4, 4)))[0].save(tmp_path / "d")
    partly.load(tmp_path / "d", strict=False)


def test_load_model_names_the_call_for_a_checkpoint_of_a_run(tmp_path: Path) -> None:
    booster, model = job()
    booster.save(tmp_path / "c")
    for path in (tmp_path / "c", tmp_path, tmp_path / "c" / "manifest.json"):
        with pytest.raises(
            ValueError, match=r"is a checkpoint of booster\.save, which booster\.load\('.*'\) reads"
        ):
            booster.load_model(model, path)
