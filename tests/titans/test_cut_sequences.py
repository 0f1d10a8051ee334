"""The models of the zoo, where sequences are cut, equal themselves trained serially: every gradient, through
both doors, under plans that also cut the batch, the depth and the weights.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from colossalai.nn.sequence import SequenceParallel
from colossalai.testing import RankError, parametrize_sample, spawn
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import ParityRun, Problem, SerialRun, assert_equal_to_serial
from tests.rows.plans import close, close_weights, saved_weights
from tests.titans.cut_sequences import launch, problem, train_by

NAMES = "family, plan, ranks, length, padding, door"
FAMILIES = ("gpt", "bert", "vit")
# a length that divides, one that does not, one shorter than the ring, and one token (of GPT, two)
TEXTS = ((16, "none"), (13, "right"), (13, "left"), (3, "none"), (1, "none"), (16, "left"))


def plans() -> list[tuple[dict[str, Any], int]]:
    found = []
    for size, kind in itertools.product((2, 4, 8), ("ring", "ulysses", "both")):
        for data, pipeline, tensor in itertools.product((1, 2), (1, 2), (1, 2)):
            ranks = size * data * pipeline * tensor
            shared = {"ring": 1, "ulysses": size, "both": 2}[kind] * tensor
            if ranks > 16 or 8 % shared or (kind == "both" and size == 2):
                continue
            plan: dict[str, Any] = {"sequence": {"size": size, "attention": kind}, "pipeline": pipeline}
            if tensor > 1:
                plan["tensor"] = {"size": tensor, "mode": "1d"}
            found.append((plan, ranks))
    return [*found, ({"tensor": {"size": 2, "mode": "sequence"}}, 4)]


CASES = []
for i, ((plan, ranks), family) in enumerate(itertools.product(plans(), FAMILIES)):
    length, padding = TEXTS[i % len(TEXTS)]
    door = "engine" if plan.get("pipeline", 1) > 1 or i % 2 else "ddp"
    # of one token, GPT has nothing to predict
    CASES.append((family, plan, ranks, max(length, 2) if family == "gpt" else length, padding, door))

IDS = [
    f"{family}{length}-{padding}-{door}-{plan.get('sequence', {'attention': 'mode'})['attention']}{ranks}"
    f"-pp{plan.get('pipeline', 1)}-tp{plan.get('tensor', {'size': 1})['size']}"
    for family, plan, ranks, length, padding, door in CASES
]
SMALL = [i for i, case in enumerate(CASES) if case[2] <= 4]  # ranks that a laptop starts in a second
LARGE = [i for i, case in enumerate(CASES) if case[2] > 4]


def under(
    task: Problem, plan: dict[str, Any], door: str, family: str, length: int, checkpoint: bool
) -> ParityRun:
    launch(plan, NUM_MICRO_BATCHES=2)
    return train_by(door, task, family, length, checkpoint=checkpoint)


def compare(family: str, plan: dict[str, Any], ranks: int, length: int, padding: str, door: str) -> None:
    kept = {"family": family, "length": length, "checkpoint": length % 2 == 1}
    assert_equal_to_serial(
        partial(problem, padding=padding, **kept),
        partial(under, plan=plan, door=door, **kept),
        ranks,
        timeout=240,
    )


@parametrize_sample(NAMES, [CASES[i] for i in SMALL], n=9, ids=[IDS[i] for i in SMALL])
def test_training_equals_the_serial_one(
    family: str, plan: dict[str, Any], ranks: int, length: int, padding: str, door: str
) -> None:
    compare(family, plan, ranks, length, padding, door)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES.split(", "), [CASES[i] for i in LARGE], ids=[IDS[i] for i in LARGE])
def test_training_on_many_ranks(
    family: str, plan: dict[str, Any], ranks: int, length: int, padding: str, door: str
) -> None:
    compare(family, plan, ranks, length, padding, door)


def without_the_sum(task: Problem, **plan: Any) -> ParityRun:
    launch(plan)
    SequenceParallel.total = lambda self, x: x  # type: ignore[method-assign]
    return train_by("ddp", task, "bert", 13)


def test_without_the_sum_over_the_ranks_losses_are_wrong() -> None:
    with pytest.raises(RankError, match="ParityError: loss at step 0 differs"):
        assert_equal_to_serial(partial(problem, "bert", 13, "right"), partial(without_the_sum, sequence=2), 2)


def check_sharded(rank: int, world_size: int, port: int, folder: str, door: str, family: str) -> None:
    task = problem(family, 13, "right", checkpoint=True)
    serial = SerialRun(task)
    launch({"sequence": 2})
    run = train_by(door, task, family, 13)
    for batch in task.batches:
        close(run.forward_backward(batch), serial.forward_backward(batch))
        close(run.gradient_norm(), serial.gradient_norm())
        run.update()
        serial.update()
    assert isinstance(run, BoosterRun)
    close_weights(saved_weights(run.booster, run.model, folder), serial)


@pytest.mark.parametrize(("door", "family"), [("zero2", "gpt"), ("gemini", "bert")])
def test_weights_and_states_are_sharded_over_the_ranks_too(door: str, family: str, tmp_path: Path) -> None:
    spawn(check_sharded, 4, folder=str(tmp_path), door=door, family=family)


def save(rank: int, world_size: int, port: int, folder: str, family: str, **plan: Any) -> None:
    launch(plan)
    task = problem(family, 13)
    run = train_by("ddp", task, family, 13)
    run.forward_backward(task.batches[0])
    run.update()
    run.booster.save(folder)  # type: ignore[attr-defined]


def go_on(rank: int, world_size: int, port: int, folder: str, family: str, **plan: Any) -> None:
    task = problem(family, 13)
    serial = SerialRun(task)
    for batch in task.batches:
        serial.forward_backward(batch)
        serial.update()
    launch(plan)
    run = train_by("zero2", task, family, 13)
    assert isinstance(run, BoosterRun)
    run.booster.load(folder)
    run.forward_backward(task.batches[1])
    run.update()
    close_weights(saved_weights(run.booster, run.model, f"{folder}-end"), serial)


@pytest.mark.parametrize("family", ["gpt", pytest.param("vit", marks=pytest.mark.slow)])
def test_a_run_goes_on_under_another_plan(family: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    (tmp_path / "run-end").mkdir()
    spawn(save, 4, folder=folder, family=family, sequence=2, tensor={"size": 2, "mode": "1d"})
    spawn(go_on, 2, folder=folder, family=family, sequence={"size": 2, "attention": "ulysses"})
