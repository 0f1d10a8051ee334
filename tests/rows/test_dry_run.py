"""A dry run of cut sequences: every rank of the first replica, with its part of tokens and states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.dry_run import Parts, dry_run
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing.pipelined import cut
from tests.rows.plans import LENGTH, build, build_experts, sgd, to_plan, token_loss

BATCH = 256  # so that activations are more than weights


def parts(build: Callable[[], torch.nn.Module] = build) -> Parts:
    place = Placement(gpc.pipeline_parallel_size, 1, Shape.LOOP)
    (model,) = cut(build(), place, gpc.get_local_rank(ParallelMode.PIPELINE))  # type: ignore[arg-type]
    model = torch.nn.Sequential(*map(to_plan, model))
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return Parts(model, sgd(model.parameters()), token_loss, (ids, ids))


def test_ranks_of_one_sequence() -> None:
    (whole,) = dry_run({}, 1, parts)
    reports = dry_run({"parallel": {"sequence": 2}}, 4, parts)
    assert [(r.rank, r.coord["sp"], r.parameters) for r in reports] == [
        (0, 0, whole.parameters),
        (1, 1, whole.parameters),
    ]
    assert reports[0].memory == reports[1].memory
    assert reports[0].memory.activations < 0.6 * whole.memory.activations
    assert reports[0].memory.buckets > 0, "DDP averages over the ranks of one sequence, too"
    (alone,) = {r.memory.buckets for r in dry_run({"parallel": {"sequence": 2}}, 2, parts)}
    assert alone == reports[0].memory.buckets


def test_zero_divides_by_all_ranks_with_the_same_weights() -> None:
    config = {"zero": {"level": 1}}
    (divided,) = dry_run(config, 4, parts)
    reports = dry_run(config | {"parallel": {"sequence": 2}}, 4, parts)
    assert len(reports) == 2
    assert {r.memory.states for r in reports} == {divided.memory.states}


def test_stages_of_cut_sequences() -> None:
    config = {"parallel": {"pipeline": 2, "sequence": 2}, "NUM_MICRO_BATCHES": 2}
    reports = dry_run(config, 8, parts)
    assert [(r.rank, r.coord["pp"], r.coord["sp"]) for r in reports] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]


def test_experts() -> None:
    make = partial(parts, partial(build_experts, (4,), None))
    (whole,) = dry_run({}, 1, make)
    all_experts = 4 * 8 * 8
    others = whole.parameters - all_experts
    plan = {"parallel": {"moe": {"size": 2}}}
    (ddp,) = dry_run(plan, 4, make)
    assert ddp.parameters == others + all_experts // 2
    assert ddp.memory.buckets == 4 * others, "DDP does not see the experts"
    (zero,) = dry_run({**plan, "zero": {"level": 1}}, 4, make)
    assert zero.memory.states == 8 * (-(-others // 4) + all_experts // 2 // 2)
    for section in ({"level": 2}, {"level": 3, "placement_policy": "cuda"}):
        (zero,) = dry_run({**plan, "zero": section}, 4, make)
        assert zero.memory.states == 8 * (-(-others // 4) + all_experts // 2 // 2)
    reports = dry_run({"parallel": {"moe": {"size": 2}, "pipeline": 2}, "NUM_MICRO_BATCHES": 2}, 8, make)
    assert [r.coord["pp"] for r in reports] == [0, 1]
