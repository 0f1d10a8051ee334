"""Gradients of a loss that was not scaled are never divided by the loss scale."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.amp.naive_amp import ConstantGradScaler, FP16Optimizer
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision


def _boosted(precision: Any) -> tuple[Booster, nn.Module, Any]:
    model = nn.Linear(8, 2)
    booster = Booster(device="cpu", mixed_precision=precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def _loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 8)).float().sum()


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "fp16_apex"])
@pytest.mark.parametrize("use", ["step", "clip"])
def test_a_backward_pass_beside_the_booster_is_refused(precision: str, use: str) -> None:
    booster, model, optimizer = _boosted(precision)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # a good step does not excuse the next
        _loss(model).backward()
        with pytest.raises(RuntimeError, match=r"not scaled, .* instead of loss\.backward\(\)"):
            optimizer.step() if use == "step" else optimizer.clip_grad_by_norm(1.0)
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        booster.backward(_loss(model), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]


def test_it_is_right_where_nothing_is_scaled() -> None:
    for precision in (None, "bf16", BF16MixedPrecision(half_weights=True)):
        _, model, optimizer = _boosted(precision)
        before = model.weight.detach().clone()
        _loss(model).backward()
        optimizer.step()
        assert not torch.equal(before, model.weight)


def test_a_step_without_gradients_needs_no_backward_pass() -> None:
    _, model, optimizer = _boosted("fp16")
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.weight)


def test_a_missing_scale_is_no_news_where_nothing_is_scaled() -> None:
    plain, half = nn.Linear(8, 2), nn.Linear(8, 2).bfloat16()
    state = torch.optim.SGD(plain.parameters(), lr=0.1).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FP16Optimizer(torch.optim.SGD(half.parameters(), lr=0.1), ConstantGradScaler(1.0)).load_state_dict(
            state
        )
    with pytest.warns(UserWarning, match="holds no loss scale .* goes on with the scale 8"):
        FP16Optimizer(torch.optim.SGD(half.parameters(), lr=0.1), ConstantGradScaler(8.0)).load_state_dict(
            state
        )
