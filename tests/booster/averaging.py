"""What the page about the booster promises of the plugin that it writes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.booster.plugin import Plugin
from colossalai.testing.parity import check_plan
from tests.booster.plans import PluginRun, problem


def check_plugin(plan: type[Plugin]) -> None:
    """It equals the serial model, and averages gradients of bf16 weights with masters."""
    check_plan(problem(), lambda made: PluginRun(made, plan()))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    raw = torch.optim.AdamW(model.parameters(), lr=0.1)  # gets masters without a gradient before the step
    booster = Booster("cpu", BF16MixedPrecision(half_weights=True), plan())
    model, optimizer, *_ = booster.boost(model, raw)  # type: ignore[assignment]
    assert list(map(id, optimizer.trained_parameters())) == list(map(id, model.parameters()))
    for _ in range(3):
        torch.manual_seed(dist.get_rank())
        booster.backward(model(torch.randn(4, 8)).float().square().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    both = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(both, model.weight.detach())
    assert torch.equal(*both)
