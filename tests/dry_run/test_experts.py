"""A dry run of experts plays even loads: memory of weights, states and activations, shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.dry_run import Parts, dry_run
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, Top2Router, TPExperts

WIDTH, INNER, EXPERTS = 16, 64, 8


class Model(nn.Module):
    def __init__(self, experts: type[FFNExperts] = FFNExperts) -> None:
        super().__init__()
        self.moe = MoeLayer(WIDTH, EXPERTS, Top2Router(), experts(EXPERTS, WIDTH, INNER))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))  # type: ignore[no-any-return]


def parts(samples: int, experts: type[FFNExperts] = FFNExperts) -> Parts:
    model = Model(experts)
    x, y = torch.zeros(samples, 32, WIDTH), torch.zeros(samples, 32, 4)
    return Parts(model, torch.optim.Adam(model.parameters()), MoeLoss(0.1, nn.MSELoss), (x, y))


@pytest.mark.parametrize("experts", [FFNExperts, TPExperts])
@pytest.mark.parametrize("plan", [{"moe": 2}, {"moe": 4}, {"moe": 2, "tensor": {"size": 2, "mode": "1d"}}])
def test_experts_are_shared_out(plan: dict[str, Any], experts: type[FFNExperts]) -> None:
    (alone,) = dry_run({}, 1, lambda: parts(8, experts))
    reports = dry_run({"parallel": plan}, 4, lambda: parts(8, experts))
    pieces = 4 if "tensor" in plan else plan["moe"]
    weights = EXPERTS * 2 * WIDTH * INNER  # of all experts
    for report in reports:
        assert report.parameters <= alone.parameters - weights * (1 - 1 / pieces)
        assert report.memory.states < 1.2 / pieces * alone.memory.states + 8 * EXPERTS * (WIDTH + INNER) * 4
        if experts is FFNExperts:  # as many rows come as go
            assert report.memory.activations < 1.2 * alone.memory.activations
