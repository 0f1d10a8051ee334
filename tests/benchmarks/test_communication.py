"""tensor_parallel_costs.md: measured equals formula, exactly, and the page shows what is measured
today.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from benchmarks.communication import MLP, PAGE, PLANS, Cost, Plan, measured, square_linear, with_tables
from colossalai.mesh import Mesh, count_communication, shard
from colossalai.testing import spawn

NAMES = [plan.name for plan in PLANS]


def without_calls(cost: Cost) -> Cost:
    return replace(cost, collectives=0)


@pytest.mark.parametrize("plan", PLANS, ids=NAMES)
def test_measured_equals_the_closed_formula(plan: Plan) -> None:
    assert without_calls(measured(plan.tp, square_linear)) == plan.linear()
    assert without_calls(measured(plan.tp, MLP)) == plan.mlp()


def test_sizes() -> None:
    assert {plan.tp.size for plan in PLANS} == {2, 4, 8, 9, 12, 27}
    assert {plan.tp.mode for plan in PLANS} == {"1d", "2d", "2.5d", "3d"}


def test_the_page_is_what_is_measured() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python benchmarks/communication.py --write"
    assert all(f"| {name} |" in page for name in NAMES)
    changed = page.replace("| 1/27 |", "| 1/28 |")
    assert changed != with_tables(changed) == page  # a wrong number is found and mended


def _with_real_ranks(rank: int, world_size: int, port: int, name: str) -> float:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    tp = PLANS[NAMES.index(name)].tp
    mesh = Mesh(tp.axes)
    model = MLP(tp, mesh)
    x = shard(torch.ones(36, 6, 216), tp.hidden, mesh).requires_grad_()
    with count_communication() as log:
        model(x).sum().backward()
    return log.sent()


@pytest.mark.parametrize("name", ["1D, 4", "2D, 2x2", "3D, 2x2x2"])
def test_ranks_that_exist_send_as_much(name: str) -> None:
    plan = PLANS[NAMES.index(name)]
    sent = spawn(_with_real_ranks, plan.tp.size, name=name)
    assert {Fraction(s) / 4 for s in sent} == {plan.mlp().sent}
