"""save_model, save_optimizer and their counterparts under plans that cut tensors: files of the serial model,
and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.checkpoint_io import GatheredCheckpointIO
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.checkpoint_io.families import FAMILIES, Job, batches, build, optimizer_of, start, stored_tensors
from tests.pipeline import doors as pipeline_doors
from tests.pipeline.plans import launch

PLANS = ("zero1-2-1d2", "2d-4", "interleaved", "zb-v", "pp2-1d2", "zero1-2-pp2")
WAYS: dict[str, dict[str, Any]] = {
    "file": {"shard": False},
    "folder": {"shard": True, "size_per_shard": 5e-4, "use_safetensors": True},
}


def _round_trip(rank: int, world_size: int, port: int, name: str, folder: Path) -> None:
    family = FAMILIES[name]
    start(family)
    job = Job(family)
    job.train(batches(2))
    booster = job.booster
    booster.save(folder / "run")
    for way, options in WAYS.items():
        booster.save_model(job.model, folder / f"model {way}", **options)
        options = {k: v for k, v in options.items() if k != "use_safetensors"}
        booster.save_optimizer(job.optimizer, folder / f"optimizer {way}", **options)
    for way in WAYS:
        other = Job(family, seed=1)
        other.booster.load_model(other.model, folder / f"model {way}")
        other.booster.load_optimizer(other.optimizer, folder / f"optimizer {way}")
        other.booster.save(folder / f"run from {way}")
    if rank == 0:
        _compare_with_serial(folder)
    if rank == world_size - 1:
        module = job.model.unwrap()
        part = next(
            name for name, _ in module.named_modules() if name.rpartition(".")[2] in ("part2", "part5")
        )
        module.get_submodule(part).register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    if rank == world_size - 1 or family.stages > 1:  # a stage that lacks something tells the others
        with pytest.raises(RuntimeError, match=r"model file does not fit \w+: it lacks part\d\.extra"):
            booster.load_model(job.model, folder / "model file")


def _compare_with_serial(folder: Path) -> None:
    expected = dict(stored_tensors(folder / "run"))
    for way in WAYS:
        found = dict(stored_tensors(folder / f"run from {way}"))
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    model = build(3)
    model.load_state_dict(torch.load(folder / "model file", weights_only=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model/{name}"])
    optimizer = optimizer_of(model)  # plain PyTorch reads the file
    optimizer.load_state_dict(torch.load(folder / "optimizer file", weights_only=True))
    for name, param in model.named_parameters():
        for state, value in optimizer.state[param].items():
            assert isinstance(value, Tensor)
            assert torch.equal(value, expected[f"optimizer/{name}/{state}"])


@pytest.mark.parametrize("name", PLANS)
def test_files_are_those_of_the_serial_model(name: str, tmp_path: Path) -> None:
    spawn(_round_trip, FAMILIES[name].ranks, name=name, folder=tmp_path)


def _files(job: Job, folder: Path, *, save: bool) -> None:
    """Save a job as files of its parts, or load it from them."""
    booster = job.booster
    model, optimizer, scheduler = (folder / name for name in ("model", "optimizer", "scheduler"))
    if save:
        booster.save_model(job.model, model, shard=True)
        booster.save_optimizer(job.optimizer, optimizer)
        booster.save_lr_scheduler(job.scheduler, scheduler)
        return
    booster.load_model(job.model, model)
    booster.load_optimizer(job.optimizer, optimizer)
    booster.load_lr_scheduler(job.scheduler, scheduler)


def _from_files(rank: int, world_size: int, port: int, name: str, folder: Path) -> list[float]:
    """From the files of the serial run, train, and write files for it."""
    start(FAMILIES[name])
    job = Job(FAMILIES[name], seed=1)
    _files(job, folder / "serial", save=False)
    losses = job.train(batches(4)[2:])
    _files(job, folder / name, save=True)
    return losses


def test_files_of_an_optimizer_under_any_plan(tmp_path: Path) -> None:
    serial = Job(FAMILIES["serial"])
    serial.train(batches(2))
    _files(serial, tmp_path / "serial", save=True)
    expected = serial.train(batches(6)[2:])
    for name in ("zb-v", "zero1-2-pp2", "gemini-2"):
        losses = spawn(_from_files, FAMILIES[name].ranks, name=name, folder=tmp_path)[0]
        assert losses == pytest.approx(expected[:2], rel=1e-5), name
        again = Job(FAMILIES["serial"], seed=2)
        _files(again, tmp_path / name, save=False)
        assert again.train(batches(6)[4:]) == pytest.approx(expected[2:], rel=1e-5), name


def _without_names(rank: int, world_size: int, port: int, folder: Path) -> None:
    start(FAMILIES["gpipe"])
    job = Job(FAMILIES["gpipe"])
    raw = torch.optim.SGD(job.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"each stage of a pipeline counts its own; .*booster\.save"):
        GatheredCheckpointIO().save_optimizer(raw, folder / "x")
    with pytest.raises(ValueError, match=r"old does not fit the optimizer: the file knows its parameters by"):
        job.booster.load_optimizer(job.optimizer, folder / "old")
    known = torch.load(folder / "known", weights_only=True)
    known["optimizer_names"][0][0] = "another"
    if rank == 1:  # the last stage has the head, the first one what was renamed
        job.optimizer.param_groups[0]["lr"] = 7
    torch.save(known, folder / f"renamed {rank}")
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"the saved optimizer does not know part0\.weight, which is in group 0",
    ):
        job.booster.load_optimizer(job.optimizer, folder / f"renamed {rank}")
    assert job.optimizer.param_groups[0]["lr"] == (7 if rank else 1e-2)


def test_a_pipeline_needs_the_names_of_parameters(tmp_path: Path) -> None:
    serial = Job(FAMILIES["serial"])
    serial.train(batches(1))
    serial.booster.save_optimizer(serial.optimizer, tmp_path / "known")
    torch.save(serial.optimizer.state_dict(), tmp_path / "old")
    spawn(_without_names, 2, folder=tmp_path)


def _engine(rank: int, world_size: int, port: int, folder: Path) -> None:
    launch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2})
    engines = []
    for _ in range(2):
        stage = split_model(pipeline_doors.Words(tied=True), policy=pipeline_doors.POLICY)
        engines.append(colossalai.initialize(stage, pipeline_doors.optimizer_of(stage), verbose=False)[0])
    first, second = engines
    for batch in pipeline_doors.batches():
        first.zero_grad()
        first.execute_schedule(iter([batch]), return_output_label=False)
        first.step()
    io = GatheredCheckpointIO()
    io.save_optimizer(first.optimizer, folder / "optimizer")
    io.load_optimizer(second.optimizer, folder / "optimizer")
    for one, other in zip(first.optimizer.parameters(), second.optimizer.parameters(), strict=True):
        states = first.optimizer.state[one], second.optimizer.state[other]
        assert torch.equal(states[0]["momentum_buffer"], states[1]["momentum_buffer"])


def test_the_optimizer_of_an_engine_with_a_pipeline(tmp_path: Path) -> None:
    spawn(_engine, 2, folder=tmp_path)
    model = pipeline_doors.Words(tied=True)
    optimizer = pipeline_doors.optimizer_of(model)
    for batch in pipeline_doors.batches():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    expected = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer", weights_only=True))
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], value)


def _one_file(rank: int, world_size: int, port: int, name: str, folder: Path) -> list[float]:
    """From the file of the serial run, train, and write one for it."""
    family = FAMILIES[name]
    start(family)
    job = Job(family, seed=1)
    assert load_checkpoint(folder / "serial.pt", job.model, job.optimizer, job.scheduler) == 2
    losses = job.train(batches(4)[2:])
    save_checkpoint(folder / f"{name}.pt", 4, job.model, job.optimizer, job.scheduler)
    return losses


def test_one_file_of_a_training_under_any_plan(tmp_path: Path) -> None:
    serial = Job(FAMILIES["serial"])
    serial.train(batches(2))
    save_checkpoint(tmp_path / "serial.pt", 2, serial.model, serial.optimizer, serial.scheduler)
    expected = serial.train(batches(6)[2:])
    for name in ("fsdp2", "2d-4", "zb-v"):
        losses = spawn(_one_file, FAMILIES[name].ranks, name=name, folder=tmp_path)[0]
        assert losses == pytest.approx(expected[:2], rel=1e-5)
        again = Job(FAMILIES["serial"], seed=2)
        assert load_checkpoint(tmp_path / f"{name}.pt", again.model, again.optimizer, again.scheduler) == 4
        assert again.train(batches(6)[4:]) == pytest.approx(expected[2:], rel=1e-5)
