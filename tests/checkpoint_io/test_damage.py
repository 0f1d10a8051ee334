"""A thousand damaged checkpoints: each is refused with an error that names the file, or gives exactly what
was saved.

Nothing in a checkpoint is executed, and a run that refuses its checkpoint is as it was.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.checkpoint_io.files.state_file import flatten
from colossalai.testing import sample_cases
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.checkpoint_io.damage import KINDS, mark_of

SMALL = 1e-3
REFUSALS = (RuntimeError, ValueError, OSError)


class Job:
    """A model in training, with tied weights and a state of every kind."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[3].weight = model[0].weight  # type: ignore[union-attr]
        self.booster = Booster("cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
        boosted = self.booster.boost(model, optimizer)
        self.model: nn.Module = boosted.model
        self.optimizer: Any = boosted.optimizer
        for _ in range(1 + seed):
            self.booster.backward(self.model(torch.arange(6)).square().mean(), self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """All values, as they are now."""
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {n: v.clone() if isinstance(v, Tensor) else v for n, v in flatten(whole)}


def _save_files(job: Job, folder: Path, safe: bool) -> None:
    job.booster.save_model(job.model, folder, shard=True, size_per_shard=SMALL, use_safetensors=safe)
    job.booster.save_optimizer(job.optimizer, folder, shard=True, size_per_shard=SMALL)


def _load_files(job: Job, folder: Path) -> None:
    job.booster.load_model(job.model, folder)
    job.booster.load_optimizer(job.optimizer, folder)


def _save_single(job: Job, folder: Path) -> None:
    job.booster.save_model(job.model, folder / "model.safetensors")
    job.booster.save_optimizer(job.optimizer, folder / "optimizer.bin")


def _load_single(job: Job, folder: Path) -> None:
    job.booster.load_model(job.model, folder / "model.safetensors")
    job.booster.load_optimizer(job.optimizer, folder / "optimizer.bin")


FORMS: dict[str, tuple[Callable[[Job, Path], Any], Callable[[Job, Path], Any]]] = {
    "run": (
        lambda job, folder: job.booster.save(folder, {"step": 1}, size_per_shard=SMALL),
        lambda job, folder: job.booster.load(folder),
    ),
    "shards.bin": (lambda job, folder: _save_files(job, folder, safe=False), _load_files),
    "shards.safetensors": (lambda job, folder: _save_files(job, folder, safe=True), _load_files),
    "single": (_save_single, _load_single),
    "training": (
        lambda job, folder: save_checkpoint(folder / "all.pt", 1, job.model, job.optimizer),
        lambda job, folder: load_checkpoint(folder / "all.pt", job.model, job.optimizer),
    ),
}
# The run three times: it is the one that promises most.
CASES = [(form, kind, seed) for seed in range(10) for form in [*FORMS, "run", "run"] for kind in KINDS]
CASES = [(form, kind, 1000 * i + seed) for i, (form, kind, seed) in enumerate(CASES)][:1000]


class Bench:
    """Damages copies of saved checkpoints, and loads them."""

    def __init__(self, root: Path) -> None:
        self.root, self.saved = root, Job(0)
        self.expected = self.saved.state()
        for form, (save, _) in FORMS.items():
            (root / form).mkdir(parents=True)
            save(self.saved, root / form)
        self.other = Job(1)
        self.before = self.other.state()

    def fault(self, form: str, kind: str, seed: int) -> str | None:
        """None if the damage was found or did nothing, else what went wrong."""
        folder = self.root / "copy" / "checkpoint"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(self.root / form, folder)
        touched = KINDS[kind](folder, random.Random(seed))
        refusal: Exception | None = None
        try:
            FORMS[form][1](self.other, folder)
        except Exception as error:
            refusal = error
        if mark_of(folder).exists():
            return "its code was executed"
        found = self.other.state()
        if refusal is None:
            return _difference(found, self.expected)
        changed = _difference(found, self.before)
        if form == "run" and changed is not None:
            return f"the run was changed before the refusal: {changed}"
        if not isinstance(refusal, REFUSALS) or isinstance(refusal, RecursionError | NotImplementedError):
            return f"{type(refusal).__name__} instead of an error of ours: {refusal}"
        if not any(name in str(refusal) for name in [*touched, str(folder)]):
            return f"{touched} is not named: {refusal}"
        return None

    def check(self, case: tuple[str, str, int]) -> str | None:
        fault = self.fault(*case)
        if _difference(self.other.state(), self.before) is not None:
            self.other = Job(1)  # it was loaded
        return fault


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    if found.keys() != expected.keys():
        return f"other values: {sorted(found.keys() ^ expected.keys())}"
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        if not same or (isinstance(value, Tensor) and found[name].dtype != value.dtype):
            return f"{name} is {found[name]}, and {value} was saved"
    return None


def _check(root: Path, cases: list[tuple[str, str, int]]) -> Counter[str]:
    bench = Bench(root)
    faults = {case: fault for case in cases if (fault := bench.check(case)) is not None}
    assert not faults, f"{len(faults)} of {len(cases)}: " + "\n".join(f"{c}: {f}" for c, f in faults.items())
    return Counter(form for form, _, _ in cases)


def test_what_is_not_damaged_loads(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for form, (_, load) in FORMS.items():
        job = Job(1)
        assert _difference(job.state(), bench.expected) is not None
        load(job, tmp_path / form)
        assert _difference(job.state(), bench.expected) is None, form


def test_a_sample_of_damaged_checkpoints(tmp_path: Path) -> None:
    sample = sample_cases(CASES, 105)
    assert {kind for _, kind, _ in sample} == set(KINDS)
    _check(tmp_path, sample)


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints(tmp_path: Path) -> None:
    assert sum(_check(tmp_path, CASES).values()) == 1000
