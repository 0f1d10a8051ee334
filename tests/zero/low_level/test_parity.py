"""ZeRO-1 and 2 train like the serial model, in every combination of what they offer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from colossalai.testing import parametrize_sample, spawn
from tests import shared_memory
from tests.zero.low_level.problems import Case, check_case, check_equal_to_memory, launch


def check_cases(rank: int, world_size: int, port: int, cases: Sequence[Case], backend: str = "gloo") -> None:
    launch(backend)
    for case in cases:
        # In bf16 ranks add in another order, and Adam makes whole steps of gradients that are nothing but
        # rounding: SGD has parity there, and states on a disk, which only Adam has, are compared with those
        # in memory.
        by_bits = case.nvme and case.precision == "bf16" and world_size > 1
        try:
            (check_equal_to_memory if by_bits else check_case)(case)
        except Exception as error:
            raise AssertionError(f"{case} on {world_size} ranks: {error}") from error


COMBINATIONS = [
    Case(
        stage=stage,
        precision=precision,
        accumulate=accumulate,
        clip=clip,
        recompute=recompute,
        offload=offload,
        optimizer=optimizer,
    )
    for stage, precision, accumulate, clip, recompute, offload in itertools.product(
        (1, 2), ("fp32", "bf16"), (1, 4), (0.0, 0.3), ("", "plain", "reentrant"), (False, True)
    )
    for optimizer in (("hybrid", "adamw") if precision == "fp32" else ("sgd", "torch_sgd"))
]
PARTS = 24
RUNS = list(itertools.product((1, 2, 4), range(PARTS)))


@parametrize_sample("ranks, part", RUNS, n=4)
def test_every_combination(ranks: int, part: int) -> None:
    spawn(check_cases, ranks, cases=COMBINATIONS[part::PARTS], timeout=120)


LONG = [
    Case(
        stage=stage,
        precision=precision,
        nvme=nvme,
        accumulate=accumulate,
        clip=clip,
        recompute=("plain", "reentrant")[accumulate > 1] if recompute else "",
        offload=(stage == 1) == (accumulate > 1),
        optimizer="hybrid" if nvme or precision == "fp32" else "sgd",
        steps=100,
    )
    for stage, precision, nvme, accumulate, clip, recompute in itertools.product(
        (1, 2), ("fp32", "bf16"), (0.0, 0.5, 1.0), (1, 4), (0.0, 0.3), (False, True)
    )
]


LONG_PARTS = 48


@parametrize_sample("ranks, part", list(itertools.product((1, 2, 4), range(LONG_PARTS))), n=2)
def test_a_hundred_steps(ranks: int, part: int) -> None:
    spawn(check_cases, ranks, cases=LONG[part::LONG_PARTS], backend=shared_memory.NAME, timeout=300)


def test_the_size_of_buckets_changes_nothing() -> None:
    cases = [
        Case(stage=stage, bucket=bucket, overlap=overlap)
        for stage in (1, 2)
        for bucket in (1, 10**6)
        for overlap in (False, True)
    ]
    spawn(check_cases, 2, cases=cases)


def test_accumulation_that_reduces_every_pass() -> None:
    cases = [Case(stage=stage, accumulate=4, synced=True, recompute="reentrant") for stage in (1, 2)]
    spawn(check_cases, 2, cases=cases)


def test_fp16() -> None:
    cases = [Case(stage=2, precision="fp16", clip=clip, optimizer="sgd") for clip in (0.0, 0.3)]
    spawn(check_cases, 2, cases=cases)
