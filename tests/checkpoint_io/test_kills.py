"""SIGKILL at random moments while checkpoints are written: there is always one that loads, and it is never an
older one than the last that was reported as complete.

Each trial is a job that goes on where the killed one before it left off, on the same folders, so that what
dead jobs left behind piles up for the next.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.checkpoint_io import latest
from colossalai.checkpoint_io.inspection.detect import faults_of, find_forms
from colossalai.checkpoint_io.inspection.views import RunView
from colossalai.testing import RankError, spawn
from tests.pipeline.plans import launch

WIDTH = 192  # a weight of 144 KiB, so that there is something to write
ACKNOWLEDGED, SAVING = "acknowledged", "saving"


def _job() -> tuple[Booster, nn.Module]:
    booster = Booster("cpu", plugin=TorchDDPPlugin())
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return booster, booster.boost(model).model


def _set(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)


def _kill_later(delay: float) -> None:
    """Have another process kill this one: no part of this one can then finish what it has begun."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(delay)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)


def _note(folder: Path, name: str, step: int) -> None:
    """In one system call, so that it is there or not."""
    with (folder / name).open("r+b" if (folder / name).exists() else "wb", buffering=0) as file:
        file.write(b"%010d" % step)


def _noted(folder: Path, name: str) -> int:
    return int((folder / name).read_bytes() or b"0") if (folder / name).exists() else 0


def _save_until_killed(
    rank: int,
    world_size: int,
    port: int,
    root: Path,
    replace: bool,
    background: bool,
    victim: int,
    moment: float,
) -> None:
    launch({})
    booster, model = _job()
    saves = root / "saves"
    step = booster.load(saves)["step"] if latest(saves) is not None else 0
    assert step == 0 or all(bool((p == step).all()) for p in model.parameters())
    typical = 0.0
    for number in range(1, 1000):
        step += 1
        _set(model, step)
        begin = time.perf_counter()
        if rank == 0:
            _note(root, SAVING, step)
        path = saves / ("only" if replace else f"step-{step:06d}")
        save = booster.save(path, {"step": step}, keep=2, size_per_shard=0.2, background=background)
        if background:
            _set(model, -1)  # training goes on and changes the weights
            save.wait()
        if rank == 0:
            _note(root, ACKNOWLEDGED, step)
        typical = time.perf_counter() - begin
        if number == 1 and rank == victim:
            _kill_later(typical * 3 * moment)


def _trial(root: Path, draw: random.Random, replace: bool, background: bool, ranks: int) -> bool:
    """One job until it is killed, and a look at what it left; whether it was killed within a save."""
    options = {"replace": replace, "background": background, "victim": draw.randrange(ranks)}
    with pytest.raises(RankError, match=r"SIGKILL|signal 9"):
        spawn(_save_until_killed, ranks, timeout=120, root=root, moment=draw.random(), **options)
    acknowledged = _noted(root, ACKNOWLEDGED)
    found = latest(root / "saves")
    assert found is not None, "no checkpoint is left"
    view = RunView(found)
    step = view.extra["step"]
    assert step in (acknowledged, acknowledged + 1), f"{step} is latest, and {acknowledged} was complete"
    for item in view.items:
        if item.name.startswith("model/"):
            assert bool((view.read(item.name) == step).all()), (
                f"{item.name} of step {step} is of another step"
            )
    for folder in find_forms(root / "saves"):
        assert list(faults_of(folder, lambda n: None)) == []
    return _noted(root, SAVING) > acknowledged


def _trials(root: Path, count: int, seed: int, replace: bool, background: bool) -> int:
    draw = random.Random(seed)
    return sum(_trial(root, draw, replace, background, ranks=1 + i % 2) for i in range(count))


@pytest.mark.parametrize("background", [False, True], ids=["synchronous", "background"])
def test_a_few_kills(tmp_path: Path, background: bool) -> None:
    _trials(tmp_path, 2, seed=1, replace=background, background=background)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["synchronous", "background"])
@pytest.mark.parametrize("replace", [False, True], ids=["new-folders", "one-folder"])
def test_two_hundred_kills(tmp_path: Path, replace: bool, background: bool) -> None:
    """Fifty for each of the four cases."""
    within = _trials(tmp_path, 50, seed=2 * replace + background, replace=replace, background=background)
    print(f"{within} of 50 kills were within a save")
    assert within >= 25, "the kills mostly miss the saves"
