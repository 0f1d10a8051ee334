"""Updating a model part by part gives the numbers of one step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import FusedSGD, HybridAdam


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(n).to(dtype)) for n in (5, 3, 4)]
    for p in made[:2]:
        p.grad = torch.randn(p.shape).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [HybridAdam, lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9)])
def test_parts_equal_the_whole(dtype: torch.dtype, build: Callable[[Any], Any]) -> None:
    together, parted = parameters(dtype), parameters(dtype)
    groups = [[{"params": p[:1], "lr": 0.1}, {"params": p[1:], "lr": 0.01}] for p in (together, parted)]
    one, many = build(groups[0]), build(groups[1])
    for _ in range(2):
        one.step()
        for p in reversed(parted):
            many.step_on([p])
    for a, b in zip(together, parted, strict=True):
        assert torch.equal(a, b)
    assert parted[2] not in many.state  # it has no gradient


def test_only_the_named_ones_move() -> None:
    params = parameters(torch.float32)
    before = [p.detach().clone() for p in params]
    grad = params[1].grad.clone()
    optimizer = HybridAdam(params, lr=0.1)
    optimizer.step_on(params[1:], div_scale=2.0)
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [True, False, True]
    assert torch.allclose(optimizer.state[params[1]]["exp_avg"], 0.1 * grad / 2)
