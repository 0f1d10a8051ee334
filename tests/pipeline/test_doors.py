"""Both doors of a pipeline, ``Engine`` and ``Booster``, train alike: equal to the serial model, or refused in
the same words.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from colossalai.testing import sample_cases, spawn
from tests.pipeline.doors import SCHEDULES, Case, Outcome, run, serial

DOORS = ("engine", "booster")
PLUGINS = ("none", "zero1", "zero2", "gemini")
HALF = ("fp16", "fp16_naive", "fp16_apex")
BOTH = [
    Case(plugin, schedule, tied, precision)
    for plugin, schedule, tied in itertools.product(PLUGINS, SCHEDULES, (False, True))
    for precision in (("fp32", *HALF) if plugin == "none" else ("fp32", "fp16", "bf16"))
]
TIED_GEMINI = [Case("gemini", schedule, True) for schedule in ("1f1b", "interleaved")]
# what no config can say
ONE_DOOR = [
    Case(plugin, schedule, tied, precision)
    for plugin, schedule, tied in itertools.product(("ddp", "fsdp"), SCHEDULES, (False, True))
    for precision in ("fp32", "fp16", "bf16", "fp16_naive")
    if (plugin, precision) != ("fsdp", "fp16_naive")  # refused by name
]
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # a step is in the order of 0.5
ROUGH = 3e-3
IN_HALVES = "computes the gradients of weights after the backward pass of a stage"
SHARED_BY_STAGES = "which two stages of one rank share"  # torch 2.11 and 2.12 cannot shard it


def assert_equal_to_serial(case: Case, found: Outcome, door: str, skipped: int = 0) -> None:
    expected = serial(case.tied, skipped)
    assert not found.refusal, f"{case} through {door}: {found.refusal}"
    assert found.weights, f"{case} through {door}: this rank holds nothing"
    for name, tensor in found.weights.items():
        atol = TOLERANCE.get(case.precision, ROUGH)
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
            # halves may be added up and averaged in another order
            atol = 1e-6 if case.precision == "fp32" else ROUGH
            torch.testing.assert_close(tensor, booster.weights[name], rtol=0, atol=atol)


def check_one(rank: int, world_size: int, port: int, cases: list[Case]) -> None:
    for case in cases:
        found = run(case, "booster")
        if case.plugin == "fsdp" and case.schedule in ("zbh1", "zbv"):
            old = TorchVersion(torch.__version__) < "2.13" and case.schedule == "zbv" and case.tied
            assert (SHARED_BY_STAGES if old else IN_HALVES) in found.refusal, f"{case}: {found.refusal!r}"
        else:
            assert_equal_to_serial(case, found, "booster")


def check_overflow(rank: int, world_size: int, port: int, cases: list[Case]) -> None:
    for case, door in itertools.product(cases, DOORS):
        assert_equal_to_serial(case, run(case, door, overflow=True), door, skipped=1)


def test_weights_that_stages_share_under_gemini() -> None:
    spawn(check_both, 4, cases=TIED_GEMINI)


def test_both_doors_train_alike() -> None:
    spawn(check_both, 2, cases=sample_cases(BOTH, 24))


def test_ddp_with_several_chunks_on_a_rank() -> None:
    spawn(check_one, 4, cases=[Case("ddp", "interleaved", True), Case("ddp", "zbv", False)])


def test_fsdp_cuts_a_stage_over_its_replicas() -> None:
    cases = [
        Case("fsdp", "1f1b", True),
        Case("fsdp", "interleaved", False, "bf16"),
        Case("fsdp", "zbv", True),
    ]
    spawn(check_one, 4, cases=cases)


def test_a_stage_that_overflows_skips_the_step_of_all() -> None:
    cases = [Case("none", "1f1b", False, "fp16"), Case("none", "zbv", True, "fp16_naive")]
    cases += [Case("zero2", "interleaved", False, "fp16"), Case("gemini", "1f1b", True, "fp16")]
    spawn(check_overflow, 2, cases=cases)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("check", "cases"), [(check_both, BOTH), (check_one, ONE_DOOR)])
def test_every_case(check: Any, cases: list[Case], ranks: int) -> None:
    spawn(check, ranks, cases=cases, timeout=600)
