"""Which weights count after a load: those of the checkpoint with all their digits, however they came and
whatever a plan keeps.

A plan may keep a weight in several places: in the model, as a master or digits in the optimizer, as a copy on
the host.  Each way to load is compared to the last bit with a run that was not interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.testing import sample_cases, spawn
from tests.booster.loading import PLANS, Job, Plan, differences, launch
from tests.checkpoint_io.families import stored_tensors

BEFORE, AFTER = range(2), range(2, 4)
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


# Plans whose checkpoints the others go on from; all of one family of optimizers.
SOURCES = [
    Plan("zero1", "fp32", "torch", 2),
    Plan("zero2", "bf16", "hybrid", 2, "offload"),
    Plan("gemini", "bf16", "hybrid", 2, "disk"),
    Plan("ddp", "fp16", "torch", 2),
    Plan("zero1", "fp16", "torch", 1),
    Plan("gemini", "fp16", "torch", 2, "auto"),
    Plan("ddp", "bf16", "hybrid", 1),
    Plan("fsdp", "fp32", "hybrid", 2),
]
TARGETS = [
    *SOURCES,
    Plan("zero2", "bf16", "torch", 3, "offload"),
    Plan("zero1", "bf16", "hybrid", 1),
    Plan("gemini", "fp32", "torch", 1, "disk"),
    Plan("gemini", "bf16", "hybrid", 3, "cpu"),
]


def _save(rank: int, world_size: int, port: int, plan: Plan, folder: Path) -> list[float]:
    launch()
    job = Job(plan, 0, folder)
    job.train(BEFORE)
    job.booster.save(folder / str(plan))
    return job.train(AFTER, everywhere=True)


def _reload(
    rank: int, world_size: int, port: int, plan: Plan, sources: list[Plan], folder: Path
) -> dict[str, Any]:
    launch()
    found = {}
    for source in sources:
        job = Job(plan, 1, folder)
        job.train(OTHER)
        job.booster.load(folder / str(source))
        job.booster.save(folder / "again")
        faults = []
        if rank == 0:
            stored, again = (dict(stored_tensors(folder / name)) for name in (str(source), "again"))
            for name in (
                stored.keys() & again.keys()
            ):  # masters may be of no use here, or weights take their place
                if stored[name].dtype == again[name].dtype and not torch.equal(stored[name], again[name]):
                    faults.append(name)
        found[str(source)] = (job.train(AFTER, everywhere=True), faults)
        dist.barrier()
    return found


def _check_reloads(sources: list[Plan], targets: list[Plan], folder: Path) -> None:
    expected = {str(plan): spawn(_save, plan.ranks, plan=plan, folder=folder)[0] for plan in sources}
    for target in targets:
        found = spawn(_reload, target.ranks, plan=target, sources=sources, folder=folder, timeout=120)[0]
        for source in sources:
            losses, faults = found[str(source)]
            assert not faults, f"{source} to {target}: {faults}"
            rough = 1e-4 if (source.precision, target.precision) == ("fp32", "fp32") else 2e-2
            assert losses == pytest.approx(expected[str(source)], rel=rough), f"{source} to {target}"


def test_another_plan_goes_on(tmp_path: Path) -> None:
    _check_reloads(SOURCES[:3], [TARGETS[i] for i in (0, 3, 7, 8, 10)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_other_plan_goes_on(target: Plan, tmp_path: Path) -> None:
    _check_reloads(SOURCES, [target], tmp_path)


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=str(plan), marks=() if plan in SAMPLE else pytest.mark.slow) for plan in PLANS],
)
def test_every_way_to_load_goes_on_to_the_last_bit(plan: Plan, tmp_path: Path) -> None:
    faults = spawn(_go_on, plan.ranks, plan=plan, folder=tmp_path)
    assert not any(faults), "\n".join(line for own in faults for line in own)
