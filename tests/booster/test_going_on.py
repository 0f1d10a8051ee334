"""Which weights count after a load: those of the checkpoint with all their digits, however they came and whatever a plan keeps.

A plan may keep a weight in several places: in the model, as a master or digits in the optimizer, as a copy on the host.  Each way to load is
compared to the last bit with a run that was not interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from colossalai.testing import sample_cases, spawn
from tests.booster.loading import PLANS, Job, Plan, differences, launch

BEFORE, AFTER = range(2), range(2, 5)
OTHER = range(100, 102)  # what a run had been trained with before something else is loaded

# What CI runs: those that have been wrong, and a spread sample of the others.
KNOWN = ("zero1-offload-fp32-sgd-2", "zero2-bf16-hybrid-2", "gemini-cpu-bf16-torch-2", "ddp-bf16-hybrid-2")
SAMPLE = {*(plan for plan in PLANS if str(plan) in KNOWN), *sample_cases(PLANS, 8)}


def _load(job: Job, folder: Path) -> None:
    job.booster.load(folder / "run")


def _model_then_optimizer(job: Job, folder: Path) -> None:
    job.booster.load_model(job.model, folder / "model")
    job.booster.load_optimizer(job.optimizer, folder / "optimizer")


def _optimizer_then_model(job: Job, folder: Path) -> None:
    job.booster.load_optimizer(job.optimizer, folder / "optimizer")
    job.booster.load_model(job.model, folder / "model")


ALL: dict[str, Callable[[Job, Path], None]] = {
    "load": _load,
    "load_model, load_optimizer": _model_then_optimizer,
    "load_optimizer, load_model": _optimizer_then_model,
}


def _go_on(rank: int, world_size: int, port: int, plan: Plan, folder: Path) -> list[str]:
    launch()
    job = Job(plan, 0, folder)
    job.train(BEFORE)
    job.booster.save(folder / "run")
    job.booster.save_model(job.model, folder / "model")
    job.booster.save_optimizer(job.optimizer, folder / "optimizer")
    weights, states = job.state()
    saved = job.truth()
    losses = job.train(AFTER)
    expected = (losses, *job.truth())
    faults = []

    def check(way: str, other: Job, wanted: object) -> None:
        found = (other.train(AFTER), *other.truth())
        faults.extend(f"{way}: {what}" for what in list(differences(found, wanted))[:3])

    for used in (False, True):
        for way, load in ALL.items():
            other = Job(plan, 1, folder)
            other.train(OTHER if used else OTHER[:0])
            load(other, folder)
            faults.extend(f"{way}, at once: {what}" for what in list(differences(other.truth(), saved))[:3])
            check(f"{way} ({'used' if used else 'new'})", other, expected)
        for names in (("model", "optimizer"), ("optimizer", "model")):
            other = Job(plan, 1, folder)
            other.train(OTHER if used else OTHER[:0])
            for name in names:
                saved_state = {"model": weights, "optimizer": states}[name]
                getattr(other, name).load_state_dict(
                    copy.deepcopy(saved_state)
                )  # torch keeps what it is given
            check(f"load_state_dict of {' and '.join(names)} ({'used' if used else 'new'})", other, expected)
    # the weights alone, in the middle of a run: three ways, one result
    ways: dict[str, Callable[[Job], None]] = {
        "load_state_dict of weights": lambda other: other.model.load_state_dict(weights),
        "load_model": lambda other: other.booster.load_model(other.model, folder / "model"),
    }
    if plan.kind != "gemini":  # which refuses it
        ways["a write in place"] = lambda other: other.write(weights)
    first = None
    for way, load in ways.items():
        other = Job(plan, 1, folder)
        other.train(OTHER)
        load(other)
        faults += [f"{way}, at once: {w}" for w in list(differences(other.state()[0], weights))[:3]]
        if first is None:
            first = (other.train(AFTER), *other.truth())
        else:
            check(way, other, first)
    return faults


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=str(plan), marks=() if plan in SAMPLE else pytest.mark.slow) for plan in PLANS],
)
def test_every_way_to_load_goes_on_to_the_last_bit(plan: Plan, tmp_path: Path) -> None:
    faults = spawn(_go_on, plan.ranks, plan=plan, folder=tmp_path)
    assert not any(faults), "\n".join(line for own in faults for line in own)
