"""bf16 with weights in bf16: what the weights lack is in the optimizer, and in its checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import BF16MixedPrecision
from colossalai.nn.optimizer import HybridAdam, Lamb
from tests.booster.plans import batches, mlp

ADAMS = {"ours": HybridAdam, "LAMB": Lamb, "torch": torch.optim.AdamW}


def _boost(adam: str) -> tuple[nn.Module, Any, Any, Booster]:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    booster = Booster(device="cpu", mixed_precision=BF16MixedPrecision(half_weights=True))
    raw = ADAMS[adam](model.parameters(), lr=1e-3, weight_decay=0.01)
    model, optimizer, criterion, _, _ = booster.boost(model, raw, nn.CrossEntropyLoss())  # type: ignore[assignment]
    return model, optimizer, criterion, booster


def _steps(model: nn.Module, optimizer: Any, criterion: Any, count: int = 3) -> list[float]:
    losses = []
    for x, y in batches((16,) * count):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("adam", ADAMS)
def test_weights_and_gradients_are_bf16_and_batch_norms_are_not(adam: str) -> None:
    model, optimizer, criterion, _ = _boost(adam)
    for x, y in batches((16,)):
        loss = criterion(model(x), y)
        optimizer.backward(loss)
        assert loss.dtype is torch.float32
    linear, norm = model.unwrap()[0][0], model.unwrap()[1]  # type: ignore[operator]
    assert linear.weight.dtype is linear.weight.grad.dtype is torch.bfloat16
    assert norm.weight.dtype is norm.running_mean.dtype is torch.float32


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
@pytest.mark.parametrize("adam", ADAMS)
def test_a_checkpoint_goes_on_exactly(adam: str, model_first: bool, shard: bool, tmp_path: Path) -> None:
    model, optimizer, criterion, booster = _boost(adam)
    _steps(model, optimizer, criterion)
    booster.save_model(model, tmp_path / "model", shard=shard)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=shard)
    expected = _steps(model, optimizer, criterion, 5)
    other, other_optimizer, criterion, booster = _boost(adam)
    _steps(other, other_optimizer, criterion, 1)
    if model_first:
        booster.load_model(other, tmp_path / "model")
    booster.load_optimizer(other_optimizer, tmp_path / "optimizer")
    if not model_first:
        booster.load_model(other, tmp_path / "model")
    assert _steps(other, other_optimizer, criterion, 5) == expected
    mine, theirs = (o.state_dict()["state"] for o in (optimizer, other_optimizer))
    for index, state in mine.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[index][name])), name


def test_the_tail_costs_two_bytes_and_its_checkpoint_holds_float32() -> None:
    model, optimizer, criterion, _ = _boost("ours")
    _steps(model, optimizer, criterion)
    weight = model.unwrap()[0][0].weight  # type: ignore[operator]
    state = optimizer.unwrap().state[weight]
    assert "master" not in state
    assert state["tail"].dtype is torch.int16
    assert state["tail"].any()
    saved = optimizer.state_dict()["state"][0]
    assert "tail" not in saved
    assert saved["master"].dtype is torch.float32
    assert torch.equal(saved["master"].bfloat16(), weight)


def test_a_copy_of_the_optimizer_keeps_the_digits() -> None:
    model, optimizer, criterion, _ = _boost("ours")
    _steps(model, optimizer, criterion)
    raw = optimizer.unwrap()
    weights = raw.param_groups[0]["params"]
    twin = copy.deepcopy(raw)
    for p, q in zip(weights, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(raw.master(p), twin.master(q))
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    raw.step()
    twin.step()
    for p, q in zip(weights, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(raw.master(p), twin.master(q))


def test_a_weight_that_is_written_to_loses_its_tail() -> None:
    model, optimizer, criterion, _ = _boost("ours")
    _steps(model, optimizer, criterion)
    raw, weight = optimizer.unwrap(), model.unwrap()[0][0].weight  # type: ignore[operator]
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.zero_grad()
    weight.grad = torch.zeros_like(weight)
    raw.state[weight]["exp_avg"].zero_()
    raw.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert (raw.master(weight) == 3.0).all()
