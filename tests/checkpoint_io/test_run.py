"""booster.save and booster.load on one process: everything a run needs, atomic, in the background, and what
is refused.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

from colossalai.booster import Booster
from colossalai.checkpoint_io import checkpoints, latest
from colossalai.checkpoint_io.runs import writing
from colossalai.checkpoint_io.runs.data_file import StoredFile
from colossalai.checkpoint_io.runs.manifest import MANIFEST, read_manifest
from colossalai.interface import OptimizerWrapper
from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_dataloader


class Tied(nn.Module):
    """Tied weights, a buffer, random numbers and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Job(NamedTuple):
    booster: Booster
    model: nn.Module
    optimizer: OptimizerWrapper
    scheduler: LRScheduler
    loader: Any

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        while len(losses) < steps:
            for (x,) in self.loader:
                noise = random.random() + float(np.random.rand())
                loss = (self.model(x) * noise).square().mean()
                self.booster.backward(loss, self.optimizer)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
        return losses


def job(
    seed: int = 0,
    build: Callable[[], nn.Module] = Tied,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    batch: int = 3,
    **booster: Any,
) -> Job:
    torch.manual_seed(seed)
    model = build()
    raw = optimizer(model.parameters(), lr=1e-2)
    data = torch.randn(11, 6, generator=torch.Generator().manual_seed(5))
    loader = get_dataloader(TensorDataset(data), shuffle=True, batch_size=batch)
    boost = Booster("cpu", **booster)
    boosted, optim, _, loader, scheduler = boost.boost(model, raw, None, loader, StepLR(raw, 2, gamma=0.5))
    return Job(boost, boosted, optim, scheduler, loader)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4, 6])  # of a pass of 4 batches
def test_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, steps: int, background: bool) -> None:
    first = job()
    first.train(steps)
    save = first.booster.save(tmp_path / "c", {"step": steps, "names": ("a", "b")}, background=background)
    expected = _rest(first, 5)
    save.wait()
    second = job(seed=1)
    second.train(3)
    assert second.booster.load(tmp_path / "c") == {"step": steps, "names": ("a", "b")}
    assert second.model.calls == steps
    assert second.scheduler.last_epoch == steps
    assert _rest(second, 5) == expected


def _rest(run: Job, steps: int) -> list[float]:
    """A loop that begins a new pass would leave the present one: the loader goes on by itself only when it
    was loaded.
    """
    state = run.loader.state_dict()
    run.loader.load_state_dict(state)
    return run.train(steps)


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16"])
def test_loss_scale_and_masters(tmp_path: Path, precision: str) -> None:
    first = job(mixed_precision=precision)
    first.train(3)
    first.booster.save(tmp_path / "c")
    expected = _rest(first, 4)
    second = job(seed=1, mixed_precision=precision)
    second.booster.load(tmp_path / "c")
    assert _rest(second, 4) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_half_weights_and_full_precision_read_each_other(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def halves() -> nn.Module:
        return nn.Linear(6, 6).to(dtype)

    def run(run: Job, steps: int = 2) -> None:
        for i in range(steps):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
            loss = run.model(x.to(run.model.weight.dtype)).float().square().mean()
            run.booster.backward(loss, run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()

    half = job(build=halves, optimizer=HybridAdam)
    run(half)
    half.booster.save(tmp_path / "half")
    masters = [half.optimizer.unwrap().master(p).clone() for p in half.model.parameters()]
    full = job(1, build=lambda: nn.Linear(6, 6), optimizer=HybridAdam)
    full.booster.load(tmp_path / "half")
    for weight, master in zip(full.model.parameters(), masters, strict=True):
        assert torch.equal(weight.detach(), master)
    full.booster.save(tmp_path / "full")
    again = job(1, build=halves, optimizer=HybridAdam)
    again.booster.load(tmp_path / "full")
    run(again, 1)
    run(half, 1)
    for a, b in zip(again.model.parameters(), half.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_that_rest_on_a_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    def offloaded(params: Any, lr: float) -> torch.optim.Optimizer:
        return HybridAdam(params, lr=lr, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)

    def step(run: Job, seed: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
        run.booster.backward(run.model(x).float().square().mean(), run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()

    first = job(build=lambda: nn.Linear(6, 6).to(dtype), optimizer=offloaded)
    step(first, 0)
    first.booster.save(tmp_path / "c", size_per_shard=1e-5)
    assert "optimizer/weight/exp_avg_sq" in read_manifest(tmp_path / "c").tensors
    step(first, 1)
    for kind in (offloaded, HybridAdam):
        second = job(1, build=lambda: nn.Linear(6, 6).to(dtype), optimizer=kind)
        step(second, 5)
        second.booster.load(tmp_path / "c")
        step(second, 1)
        for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_files_are_safetensors_and_hold_each_tensor_once(tmp_path: Path) -> None:
    run = job()
    run.train(1)
    run.booster.save(tmp_path / "c", size_per_shard=1e-4)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.ties == {"model/last.weight": "model/first.weight"}
    assert manifest.plan == {"world": 1, "mesh": {}, "plugin": None, "precision": None}
    assert len(manifest.files) > 3
    found = {}
    for name in manifest.files:
        with safe_open(tmp_path / "c" / name, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    assert found.keys() == manifest.tensors.keys()
    assert torch.equal(found["model/first.weight"], run.model.first.weight)


def test_another_batch_size_goes_on_with_the_same_sample(tmp_path: Path) -> None:
    first = job()
    order = [x for (x,) in first.loader]  # pass 0
    first.loader.sampler.set_epoch(0)
    for _, _ in zip(range(2), first.loader, strict=False):
        pass
    first.booster.save(tmp_path / "c")
    second = job(batch=2)
    second.booster.load(tmp_path / "c")
    assert torch.equal(torch.cat([x for (x,) in second.loader]), torch.cat(order)[6:])
    assert len(list(second.loader)) == 6  # the next pass is a whole one


def test_two_models_of_one_booster(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[Booster, list[Any]]:
        torch.manual_seed(seed)
        booster = Booster("cpu")
        return booster, [booster.boost(nn.Linear(2, size)).model for size in (3, 4)]

    booster, models = pair(0)
    booster.save(tmp_path / "c")
    other, loaded = pair(1)
    other.load(tmp_path / "c")
    for a, b in zip(models, loaded, strict=True):
        assert torch.equal(a.weight, b.weight)
    one = Booster("cpu")
    one.boost(nn.Linear(2, 3))
    with pytest.raises(
        RuntimeError, match="by a booster that had boosted 2 models, and this one has boosted 1"
    ):
        one.load(tmp_path / "c")


def test_the_latest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    run = job()
    assert latest(tmp_path) is None
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint at .*and none in the folders below"):
        run.booster.load(tmp_path)
    for step in (3, 1, 2, 9):
        run.booster.save(tmp_path / f"step{step}", {"step": step}, keep=2)
    (tmp_path / "step2" / "notes.txt").write_text("mine")
    assert [p.name for p in checkpoints(tmp_path)] == ["step2", "step9"]
    assert run.booster.load(tmp_path) == {"step": 9}
    run.booster.save(
        tmp_path / "step2", {"step": 22}, keep=1
    )  # an older one is replaced, and is the latest now
    assert run.booster.load(tmp_path) == {"step": 22}
    assert not (tmp_path / "step9").exists()
    assert len(list((tmp_path / "step2").glob("*.safetensors"))) == 1
    (tmp_path / "half").mkdir()  # of a save that was interrupted
    assert run.booster.load(tmp_path) == {"step": 22}
    run.booster.save(tmp_path / "last", keep=1)
    assert [p.name for p in (tmp_path / "step2").iterdir()] == ["notes.txt"]


def test_a_failed_save_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job()
    run.train(1)
    run.booster.save(tmp_path / "c", {"step": 1})
    before = sorted(p.name for p in (tmp_path / "c").iterdir())
    run.train(1)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"00000-00000\.safetensors cannot be written: No space left on device"):
        run.booster.save(tmp_path / "c", {"step": 2})
    save = run.booster.save(tmp_path / "c", {"step": 2}, background=True)
    with pytest.raises(OSError, match="cannot be written"):
        save.wait()
    run.booster.save(tmp_path / "c", background=True)
    with pytest.raises(OSError, match="cannot be written"):  # of the save before
        run.booster.save(tmp_path / "c")
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == before
    assert run.booster.load(tmp_path / "c") == {"step": 1}
    (tmp_path / "c" / "01234567-00000-00000.safetensors").write_bytes(b"of a save that was killed")
    run.booster.save(tmp_path / "c", {"step": 2})
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(
        OSError,
        match=r"no room for the checkpoint: it needs 1\.0 MiB, and .* has 1\.0 MiB free; nothing was written",
    ):
        run.booster.save(tmp_path / "a" / "c")
    assert not (tmp_path / "a").exists()


def test_training_may_go_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job()
    run.train(1)
    weights = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    go_on, write = threading.Event(), writing._write
    monkeypatch.setattr(writing, "_write", lambda draft: go_on.wait() and write(draft))
    save = run.booster.save(tmp_path / "c", background=True)
    assert not save.is_done
    run.train(2)
    go_on.set()
    save.wait()
    assert save.is_done
    buffer = run.booster._runs.writer._buffer
    run.booster.save(tmp_path / "d", background=True).wait()
    assert run.booster._runs.writer._buffer is buffer  # used again
    other = job(1)
    other.booster.load(tmp_path / "c")
    for name, p in other.model.named_parameters():
        assert torch.equal(p, weights[name])


def test_a_damaged_manifest_is_passed_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job()
    said: list[str] = []
    monkeypatch.setattr(
        type(get_dist_logger()), "warning_once", lambda self, message, ranks: said.append(message)
    )
    for name in ("a", "b"):
        run.booster.save(tmp_path / name)
    assert latest(tmp_path) == tmp_path / "b"
    assert said == []
    (tmp_path / "b" / MANIFEST).write_text("{")
    assert latest(tmp_path) == tmp_path / "a"
    assert len(said) == 1
    assert str(tmp_path / "b" / MANIFEST) in said[0]


def test_a_save_that_fails_in_the_background_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may end, or train for hours, before anybody asks for the error."""
    run = job()

    def broken(draft: writing.Draft) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    said: list[str] = []
    monkeypatch.setattr(writing, "_write", broken)
    monkeypatch.setattr(type(get_dist_logger()), "error", lambda self, message: said.append(message))
    save = run.booster.save(tmp_path / "c", background=True)
    with pytest.raises(OSError, match="the disk is full"):
        save.wait()
    assert len(said) == 1
    assert f"in the background to {tmp_path / 'c'} failed" in said[0]


# What does not fit, or is damaged: the message names it, and nothing is changed.


def _refused(
    run: Job, path: Path, message: str, kind: type[Exception] = RuntimeError, **options: Any
) -> None:
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    states = repr(run.optimizer.state_dict())
    with pytest.raises(kind, match=message):
        run.booster.load(path, **options)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert repr(run.optimizer.state_dict()) == states


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = job()
    run.train(2)
    run.booster.save(tmp_path / "c", size_per_shard=1e-4)
    return tmp_path / "c"


def _wide() -> nn.Module:
    model = Tied()
    model.last = nn.Linear(6, 7)
    return model


def _more() -> nn.Module:
    model = Tied()
    model.added = nn.Linear(6, 6)
    return model


def test_parameters_that_are_new_start_without_states(saved: Path) -> None:
    run = job(1, build=_more)
    run.train(1)
    assert run.booster.load(saved, strict=False) == job(2).booster.load(saved)
    states = run.optimizer.unwrap().state
    model: Any = run.model.unwrap()
    assert not states.get(model.added.weight)
    assert states[model.first.weight]
    run.train(1)


@pytest.mark.parametrize("precision", [None, "fp16_naive"])
def test_a_run_may_start_from_a_model_without_an_optimizer(tmp_path: Path, precision: str | None) -> None:
    bare = Booster("cpu")
    weight = bare.boost(nn.Linear(4, 4)).model.weight
    bare.save(tmp_path / "start")
    booster, model = Booster("cpu", mixed_precision=precision), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer, *_ = booster.boost(model, optimizer)

    def train() -> None:
        booster.backward(model(torch.ones(2, 4)).float().sum(), optimizer)
        optimizer.step()

    train()
    with pytest.raises(RuntimeError, match=r"start holds no optimizer: .* Pass strict=False to start with"):
        booster.load(tmp_path / "start")
    booster.load(tmp_path / "start", strict=False)
    assert not optimizer.unwrap().state
    train()  # from masters, if there are some, that are the new weights
    torch.testing.assert_close(model.weight.float(), weight, rtol=1e-3, atol=1e-3)


def test_models_and_optimizers_that_do_not_fit(saved: Path) -> None:
    _refused(job(1, build=_wide), saved, r"sizes differ: model/last\.weight is \(6, 6\) there and \(7, 6\)")
    _refused(
        job(1, build=_more), saved, "the saved optimizer does not know added.weight, which is in group 0"
    )
    _refused(
        job(1, optimizer=torch.optim.SGD),
        saved,
        r"the saved states are those of AdamW, and the optimizer is SGD",
    )
    bare = Booster("cpu")
    model = bare.boost(_more()).model
    with pytest.raises(
        RuntimeError, match=r"does not fit the model: it lacks model/added\.weight, .*Pass strict=False"
    ):
        bare.load(saved)
    bare.load(saved, strict=False)
    assert torch.equal(model.first.weight, model.last.weight)
    small = Booster("cpu")
    part = small.boost(nn.Sequential()).model
    with pytest.raises(RuntimeError, match=r"the model does not know .*model/first.weight"):
        small.load(saved)
    assert part is not None


def test_groups_that_were_saved_apart(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    booster = Booster("cpu")
    kept = booster.boost(model, torch.optim.SGD(groups, momentum=0.9))
    booster.save(tmp_path / "c")
    other = Booster("cpu")
    one = nn.Linear(3, 3)
    boosted = other.boost(one, torch.optim.SGD(one.parameters(), lr=0.3, momentum=0.9))
    with pytest.raises(
        RuntimeError, match="group 0 of the optimizer holds weight and bias, which were saved in"
    ):
        other.load(tmp_path / "c")
    assert boosted.optimizer.param_groups[0]["lr"] == 0.3
    assert kept.optimizer is not None


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    booster = Booster("cpu")
    model = booster.boost(Tied()).model
    booster.save(tmp_path / "c")
    _refused(job(1), tmp_path / "c", "holds no optimizer: it was saved by a booster that had boosted none")
    assert model is not None


def test_an_empty_booster_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="this booster has boosted no model"):
        Booster("cpu").save(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep is how many checkpoints stay, at least 1"),
        ({"size_per_shard": 0}, "size_per_shard is a number of MB above 0, got 0"),
        ({"extra": {"model": object()}}, "extra.model is a object, and a checkpoint holds numbers"),
    ],
)
def test_bad_options_of_save(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        job().booster.save(tmp_path / "c", **options)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"a checkpoint is a folder, but .*file is a file"):
        job().booster.save(tmp_path / "file")


def test_damaged_manifests(saved: Path) -> None:
    path = saved / MANIFEST
    text = path.read_text()
    content = json.loads(text)
    for damaged, message in (
        (text[:100], "manifest.json is damaged or cut short"),
        (text.replace("AdamW", "AdanW"), "manifest.json is damaged: its checksum is"),
        (json.dumps({"weight_map": {}}), "is not the manifest of a colossalai checkpoint"),
        (
            json.dumps(content | {"version": 99}),
            "has version 99 of the format, and this colossalai .* reads version 1",
        ),
        (text.replace("{", "["), "manifest.json is damaged"),
    ):
        path.write_text(damaged)
        _refused(job(1), saved, message)
        assert checkpoints(saved.parent) == []


def _flip(data: bytearray, place: int) -> bytearray:
    data[place] ^= 1
    return data


def test_damaged_files(saved: Path) -> None:
    manifest = read_manifest(saved)
    weight = manifest.tensors["model/first.weight"]
    path = saved / weight.boxes[0].file
    intact = path.read_bytes()
    start = len(intact) - 4
    for damaged, message, kind in (
        (_flip(bytearray(intact), start), rf"{path.name} is damaged: the checksum of \S+ is", RuntimeError),
        (intact[:-4], rf"{path.name} is cut short or damaged: \S+ is said to lie at", RuntimeError),
        (intact[:20], rf"{path.name} is not a safetensors file, or is damaged or cut short", RuntimeError),
        (b"", rf"{path.name} cannot be read", RuntimeError),
        (intact.replace(b"first.weight", b"worst.weight"), "does not hold model/first.weight", RuntimeError),
        (
            intact.replace(b'"F32"', b'"I32"'),
            "holds .* as I32 of shape .*; the manifest says F32",
            RuntimeError,
        ),
        (None, f"the checkpoint lacks its file .*{path.name}", FileNotFoundError),
    ):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        _refused(job(1), saved, message, kind)
    path.write_bytes(_flip(bytearray(intact), start))
    job(1).booster.load(saved, verify=False)  # asked for


def test_swapped_files_are_found(saved: Path) -> None:
    first, second = (saved / name for name in read_manifest(saved).files[:2])
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    _refused(job(1), saved, "does not hold|the checksum of")


def test_reading_touches_only_what_is_needed(saved: Path) -> None:
    stored = read_manifest(saved).tensors["model/first.weight"]
    view = StoredFile(saved / stored.boxes[0].file).tensor("model/first.weight", stored.dtype, stored.shape)
    assert (
        view[1:2].untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    )  # in the map of the file
