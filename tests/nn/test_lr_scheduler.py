from __future__ import annotations

import math

import pytest
import torch

from colossalai.interface import OptimizerWrapper
from colossalai.nn.lr_scheduler import CosineAnnealingLR


def _optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


@pytest.mark.parametrize("wrap", [False, True])
def test_cosine_annealing_follows_half_a_cosine(wrap: bool) -> None:
    optimizer = OptimizerWrapper(_optimizer()) if wrap else _optimizer()
    scheduler = CosineAnnealingLR(optimizer, total_steps=10, eta_min=0.01)
    for step in range(11):
        expected = 0.01 + (0.1 - 0.01) * (1 + math.cos(math.pi * step / 10)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_cosine_annealing_resumes() -> None:
    straight, resumed = _optimizer(), _optimizer()
    reference = CosineAnnealingLR(straight, total_steps=10)
    first = CosineAnnealingLR(resumed, total_steps=10)
    for _ in range(4):
        straight.step(), reference.step(), resumed.step(), first.step()
    second = CosineAnnealingLR(resumed, total_steps=10)
    second.load_state_dict(first.state_dict())
    for _ in range(4):
        straight.step(), reference.step(), resumed.step(), second.step()
    assert reference.get_last_lr() == second.get_last_lr()


@pytest.mark.parametrize("total_steps", [0, -1, 2.5, None])
def test_cosine_annealing_refuses_a_number_of_steps_that_is_none(total_steps: object) -> None:
    with pytest.raises(ValueError, match=r"CosineAnnealingLR needs total_steps.*got"):
        CosineAnnealingLR(_optimizer(), total_steps)  # type: ignore[arg-type]


def test_an_option_of_another_scheduler_is_not_passed_over_in_silence() -> None:
    with pytest.warns(UserWarning, match="CosineAnnealingLR does not use warmup_steps"):
        CosineAnnealingLR(_optimizer(), total_steps=3, warmup_steps=2)
