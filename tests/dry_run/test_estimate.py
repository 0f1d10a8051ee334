"""The memory that a dry run predicts is the memory that a step needs, counted on CPU ranks tensor by tensor."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import colossalai
from colossalai.dry_run import dry_run
from colossalai.testing import parametrize_sample, spawn
from colossalai.utils.live_bytes import LiveBytes
from tests.dry_run.plans import PLANS, build


def measure(rank: int, world_size: int, port: int, config: dict[str, Any], checkpoint: bool) -> int:
    """The most bytes of tensors that were alive in the second step of this rank."""
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    torch.set_num_threads(1)
    model, optimizer, criterion, batch = build(checkpoint)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine.step()

    step()
    engine.zero_grad()
    weights = [p for group in engine.optimizer.param_groups for p in group["params"]]
    with LiveBytes() as live:
        live.hold((*engine.model.parameters(), *engine.model.buffers(), *weights))
        live.hold(t for t in tree_leaves(dict(engine.optimizer.state)) if torch.is_tensor(t))
        step()
    return live.peak


@parametrize_sample("name", list(PLANS), n=4)
def test_prediction_is_what_a_step_needs(name: str) -> None:
    nprocs, config, checkpoint = PLANS[name]
    measured = spawn(measure, nprocs, config=config, checkpoint=checkpoint)
    reports = dry_run(config, nprocs, functools.partial(build, checkpoint))
    assert [report.rank for report in reports] == list(range(nprocs))
    for report, real in zip(reports, measured, strict=True):
        predicted = report.memory.peak
        assert predicted == pytest.approx(real, rel=0.04), (report, real / 2**20, predicted / 2**20)
