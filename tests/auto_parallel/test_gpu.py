"""On a real GPU, steps stay within their budgets, and need what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.auto_parallel.checkpoint import CheckpointPlan, CheckpointPlanner
from colossalai.auto_parallel.checkpoint.blocks import block_modes
from tests.auto_parallel.models import gpt2
from titans.model.resnet import resnet50


def _gpt2() -> tuple[nn.Module, object, nn.Module | None]:
    ids = torch.zeros(64, 64, dtype=torch.long, device="cuda")
    return gpt2(8, 512).cuda(), {"input_ids": ids, "labels": ids}, None


def _resnet() -> tuple[nn.Module, object, nn.Module | None]:
    images = torch.rand(32, 3, 128, 128, device="cuda"), torch.zeros(32, dtype=torch.long, device="cuda")
    return resnet50().cuda(), images, nn.CrossEntropyLoss()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("work", [_gpt2, _resnet])
def test_budgets_on_a_gpu(
    work: Callable[[], tuple[nn.Module, object, nn.Module | None]], dtype: torch.dtype | None
) -> None:
    model, batch, criterion = work()
    planner = CheckpointPlanner(model, batch, criterion=criterion, autocast=dtype)
    low, high = planner.least[2], planner.whole
    for number in range(5):
        plan = planner.plan(low + (high - low) * number // 4)
        with block_modes(model, plan.modes, plan.regions):
            check(plan, planner, model)


@pytest.mark.gpu
def test_compiled_steps_on_a_gpu() -> None:
    ids = torch.zeros(64, 64, dtype=torch.long, device="cuda")
    model, batch = gpt2(2, 512).cuda(), {"input_ids": ids, "labels": ids}
    planner = CheckpointPlanner(model, batch, autocast=torch.bfloat16, compiled=True)
    low, high = planner.least[2], planner.whole
    assert low < high
    for budget in (low, (low + high) // 2):
        plan = planner.plan(budget)
        with block_modes(model, plan.modes):
            torch.compiler.reset()
            check(plan, planner, torch.compile(model))
            torch.compiler.reset()


def check(plan: CheckpointPlan, planner: CheckpointPlanner, model: Any) -> None:
    """Steps of ``model``, the planner's or what was compiled of it, need what was planned."""
    for number in range(3):
        if number:  # the first may compile
            torch.cuda.reset_peak_memory_stats()
        planner.step.model.zero_grad(set_to_none=True)
        with planner.step.autocasts("cuda"):
            loss = planner.step.loss(model, planner.step.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    planner.step.model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated()
    told = f"budget {plan.budget}, told {plan.peak}, measured {peak}, {plan.modes}, {plan.regions}"
    print(told, flush=True)
    assert peak <= plan.budget, told
    assert peak >= 0.85 * plan.peak, told
