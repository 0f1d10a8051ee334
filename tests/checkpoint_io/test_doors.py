"""save_model, save_optimizer and their counterparts under plans that cut tensors: files of the serial model, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colossalai.testing import spawn
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.checkpoint_io.families import FAMILIES, Job, batches, build, optimizer_of, start, stored_tensors

# With a pipeline, optimizer files have no serial numbers.
PLANS = {"zero1-2-1d2": True, "2d-4": True, "interleaved": False, "pp2-1d2": False}
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
        if PLANS[name]:
            options = {k: v for k, v in options.items() if k != "use_safetensors"}
            booster.save_optimizer(job.optimizer, folder / f"optimizer {way}", **options)
        else:
            with pytest.raises(ValueError, match=r"each stage of a pipeline counts its own; .*booster\.save"):
                booster.save_optimizer(job.optimizer, folder / f"optimizer {way}")
    for way in WAYS:
        other = Job(family, seed=1)
        other.booster.load_model(other.model, folder / f"model {way}")
        if PLANS[name]:
            other.booster.load_optimizer(other.optimizer, folder / f"optimizer {way}")
        other.booster.save(folder / f"run from {way}")
    if rank == 0:
        _compare_with_serial(folder, PLANS[name])
    if rank == world_size - 1:
        module = job.model.unwrap()
        part = next(
            name for name, _ in module.named_modules() if name.rpartition(".")[2] in ("part2", "part5")
        )
        module.get_submodule(part).register_parameter("extra", torch.nn.Parameter(torch.ones(1)))
    if rank == world_size - 1 or family.stages > 1:  # a stage that lacks something tells the others
        with pytest.raises(RuntimeError, match=r"model file does not fit \w+: it lacks part\d\.extra"):
            booster.load_model(job.model, folder / "model file")


def _compare_with_serial(folder: Path, with_optimizer: bool) -> None:
    expected = dict(stored_tensors(folder / "run"))
    for way in WAYS:
        found = dict(stored_tensors(folder / f"run from {way}"))
        for name, value in expected.items():
            if with_optimizer or name.startswith("model/"):
                assert torch.equal(found[name], value), name
    model = build(3)
    model.load_state_dict(torch.load(folder / "model file", weights_only=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model/{name}"])
    if with_optimizer:
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(torch.load(folder / "optimizer file", weights_only=True))
        for name, param in model.named_parameters():
            for state, value in optimizer.state[param].items():
                assert isinstance(value, Tensor)
                assert torch.equal(value, expected[f"optimizer/{name}/{state}"])


@pytest.mark.parametrize("name", PLANS)
def test_files_are_those_of_the_serial_model(name: str, tmp_path: Path) -> None:
    spawn(_round_trip, FAMILIES[name].ranks, name=name, folder=tmp_path)


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
