"""Checkpoints that commit 4947fa0 wrote, loaded by the present code into the serial model and under other
plans.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.testing import spawn
from colossalai.utils import load_checkpoint
from tests.checkpoint_io.families import stored_tensors
from tests.checkpoint_io.written_at_4947fa0.write import CASES, FOLDER, STEPS, Case, Job, contents, serial_job

WEIGHTS = [
    *(f"serial/{form}" for form in ("model.bin", "model.safetensors", "shards_bin", "shards_safetensors")),
    "zero2/model.bin",
    "gemini/model.bin",
    "1d_pipeline/model.bin",
]
STATES = [f"{name}/{form}" for name in ("serial", "zero2") for form in ("optimizer.bin", "shards_bin")]
STATES.append("gemini/optimizer.bin")
TRAININGS = ["serial", "1d_pipeline"]
PLANS = {
    "zero1": Case(2, partial(LowLevelZeroPlugin, 1, "fp32")),
    "1d_pipeline": CASES["1d_pipeline"],
}


def _expected(name: str, what: str) -> dict[str, Tensor]:
    return load_file(FOLDER / "expected" / f"{name}_{what}.safetensors")


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name].to(value.dtype), value), name


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_the_serial_model(name: str) -> None:
    job = serial_job(name)
    assert job.booster.load(FOLDER / name / "run") == {"step": STEPS}
    found, expected = contents(job), _expected(name, "run")
    assert found.keys() == expected.keys()
    _compare(found, expected)
    job.train(STEPS, 1)


@pytest.mark.parametrize("path", WEIGHTS)
def test_weights_in_the_serial_model(path: str) -> None:
    name = path.partition("/")[0]
    job = serial_job(name)
    job.booster.load_model(job.model, FOLDER / path)
    weights = {n: t for n, t in _expected(name, "files").items() if not n.startswith("optimizer/")}
    _compare(contents(job), weights)


@pytest.mark.parametrize("path", STATES)
def test_states_in_the_serial_optimizer(path: str) -> None:
    name = path.partition("/")[0]
    job = serial_job(name)
    job.booster.load_model(job.model, FOLDER / name / "model.bin")
    job.booster.load_optimizer(job.optimizer, FOLDER / path)
    _compare(contents(job), _expected(name, "files"))
    job.train(STEPS, 1)


@pytest.mark.parametrize("name", TRAININGS)
def test_one_file_of_a_training_in_the_serial_model(name: str) -> None:
    job = serial_job(name)
    file = FOLDER / name / "training.pt"
    assert load_checkpoint(file, job.model, job.optimizer, job.scheduler) == STEPS
    _compare(contents(job), _expected(name, "training"))
    other = serial_job(name)
    other.booster.load_lr_scheduler(other.scheduler, FOLDER / "serial" / "scheduler.bin")
    assert other.scheduler.state_dict() == job.scheduler.state_dict()


def _saved(job: Job, folder: Path) -> dict[str, Tensor]:
    job.booster.save(folder)
    found = dict(stored_tensors(folder))
    found |= {name.removeprefix("model/"): value for name, value in found.items()}
    return found | {"head.weight": found["embed.weight"]}


def _load(rank: int, world_size: int, port: int, plan: str, folder: Path) -> None:
    case, has_stages = PLANS[plan], PLANS[plan].stages > 1
    for name in CASES:
        job = Job(case, seed=1)
        job.booster.load(FOLDER / name / "run")
        _compare(_saved(job, folder / name), _expected(name, "run"))
    for path in WEIGHTS:
        job = Job(case, seed=1)
        name = path.partition("/")[0]
        job.booster.load_model(job.model, FOLDER / path)
        states = [p for p in STATES if p.startswith(name) and not has_stages]
        for states_path in states:
            job.booster.load_optimizer(job.optimizer, FOLDER / states_path)
        expected = _expected(name, "files")
        wanted = {n: t for n, t in expected.items() if "optimizer/" not in n or states}
        _compare(_saved(job, folder / path), {n: t for n, t in wanted.items() if not n.endswith("/master")})
    for name in TRAININGS:
        job = Job(case, seed=1)
        load_checkpoint(FOLDER / name / "training.pt", job.model, job.optimizer, job.scheduler)
        _compare(_saved(job, folder / f"{name} training"), _expected(name, "training"))


@pytest.mark.parametrize("plan", PLANS)
def test_under_another_plan(plan: str, tmp_path: Path) -> None:
    spawn(_load, PLANS[plan].ranks, plan=plan, folder=tmp_path)
