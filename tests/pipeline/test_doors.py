"""Both doors of a pipeline, ``Engine`` and ``Booster``, train alike: equal to the serial model, or refused in the same words."""

from __future__ import annotations

import itertools

import pytest
import torch

from colossalai.testing import sample_cases, spawn
from tests.pipeline.doors import SCHEDULES, Case, Outcome, run, serial

DOORS = ("engine", "booster")
BOTH = [
    Case(plugin, schedule, tied, precision)
    for plugin, schedule, tied in itertools.product(
        ("none", "zero1", "zero2", "gemini"), SCHEDULES, (False, True)
    )
    for precision in (("fp32", "fp16_naive") if plugin == "none" else ("fp32", "fp16", "bf16"))
]
TIED_GEMINI = [Case("gemini", schedule, True) for schedule in ("gpipe", "1f1b", "interleaved")]
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # a step is in the order of 0.5
HALF = 3e-3


def assert_equal_to_serial(case: Case, found: Outcome, door: str) -> None:
    expected = serial(case.tied)
    assert not found.refusal, f"{case} through {door}: {found.refusal}"
    assert found.weights, f"{case} through {door}: this rank holds nothing"
    for name, tensor in found.weights.items():
        atol = TOLERANCE.get(case.precision, HALF)
        torch.testing.assert_close(
            tensor,
            expected[name],
            rtol=0,
            atol=atol,
            msg=lambda text, n=name: f"{case} through {door}, {n}: {text}",
        )


def check_both(rank: int, world_size: int, port: int, cases: list[Case]) -> None:
    for case in cases:
        engine, booster = (run(case, door) for door in DOORS)
        assert engine.refusal == booster.refusal, f"{case}: {engine.refusal!r} and {booster.refusal!r}"
        if engine.refusal:
            continue
        assert_equal_to_serial(case, engine, "engine")
        assert_equal_to_serial(case, booster, "booster")
        for name, tensor in engine.weights.items():
            torch.testing.assert_close(tensor, booster.weights[name])


def test_weights_that_stages_share_under_gemini() -> None:
    spawn(check_both, 4, cases=TIED_GEMINI)


def test_both_doors_train_alike() -> None:
    spawn(check_both, 2, cases=sample_cases(BOTH, 24))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_both_doors_train_alike_in_every_case(ranks: int) -> None:
    spawn(check_both, ranks, cases=BOTH)
