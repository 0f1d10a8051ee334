"""In the first step, ranks that share one model are compared: different batches, and gradients that differ,
are refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.policies import Cut, Policy
from colossalai.testing import spawn


def _launch(**parallel: Any) -> None:
    config = (
        {"parallel": parallel, "NUM_MICRO_BATCHES": 2} if "pipeline" in parallel else {"parallel": parallel}
    )
    colossalai.launch_from_torch(config, backend="gloo", verbose=False)


class Scaled(nn.Module):
    """Its ``scale`` is applied to the features of each rank, and nobody sums its gradient."""

    def __init__(self, scale: bool = True) -> None:
        super().__init__()
        self.up = col_nn.Linear(8, 16, role="expand")
        self.down = col_nn.Linear(16, 8, role="contract")
        self.scale = nn.Parameter(torch.ones(())) if scale else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x).relu()
        return self.down(inner if self.scale is None else inner * self.scale)


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    inner = getattr(model, "model", model)  # of an engine
    return model(x.to(next(inner.parameters()).device)).square().mean()


def _train(model: nn.Module, door: str, x: torch.Tensor, steps: int = 2) -> None:
    torch.manual_seed(0)
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    if door == "engine":
        engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
        for _ in range(steps):
            engine.zero_grad()
            engine.backward(_loss(engine, x))
            engine.step()
        return
    if door == "plain":
        for _ in range(steps):
            optimizer.zero_grad()
            _loss(model, x).backward()
            optimizer.step()
        return
    plugins = {
        "none": None,
        "ddp": TorchDDPPlugin,
        "zero": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
    }
    plugins["gemini"] = lambda: GeminiPlugin(precision="fp32", placement_policy="cpu")
    plugin = plugins[door]
    booster = Booster(device="cpu" if plugin is None else None, plugin=plugin and plugin())
    model, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        booster.backward(_loss(model, x), optimizer)
        optimizer.step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() * self.scale)


def _existing() -> nn.Module:
    policy = Policy(("block",), {"up": Cut("expand"), "down": Cut("contract")})
    return colossalai.nn.parallelize(Block(), policy=policy)


def check_1d(rank: int, world_size: int, port: int) -> None:
    _launch(tensor={"size": 2, "mode": "1d"})
    own, same = torch.randn(4, 8) + rank, torch.ones(4, 8)
    for door in ("engine", "none", "zero", "gemini"):
        with pytest.raises(
            ValueError,
            match=r"ranks 0 and 1 share one model \(tp=2\) and were given different .*\(4, 8\), has",
        ):
            _train(Scaled(scale=False), door, own)
        _train(Scaled(scale=False), door, same)
        with pytest.raises(RuntimeError, match=r"1 of 2 parameters .* different gradients .*: scale \(norms"):
            _train(Scaled(), door, same)
    for door in ("plain", "engine", "none", "ddp"):
        with pytest.raises(ValueError, match=r"different batches: 'x', of shape"):
            _train(_existing(), door, own)
        with pytest.raises(RuntimeError, match=r"1 of 2 parameters .* different gradients .*: scale \(norms"):
            _train(_existing(), door, same)
    model = _existing().eval()  # what is not trained is not compared
    model(own)
    with torch.no_grad():
        model.train()(own)
    with pytest.raises(
        ValueError, match=r"'x' is torch.float32 of shape \(1, 8\) on one and .* \(2, 8\) on the other"
    ):
        model(torch.ones(rank + 1, 8))


def test_different_batches_and_gradients_are_refused_at_all_doors() -> None:
    spawn(check_1d, 2)


def check_replicas(rank: int, world_size: int, port: int) -> None:
    _launch(tensor={"size": 2, "mode": "1d"})
    assert gpc.data_parallel_size == 2
    replica = torch.full((4, 8), float(1 + rank // 2))
    for door in ("engine", "ddp", "zero"):
        _train(Scaled(scale=False), door, replica)
    # the second replica alone is given different batches: the first one hears of it, before it waits for the
    # other
    with pytest.raises(ValueError, match="ranks 2 and 3 share one model"):
        _train(Scaled(scale=False), "ddp", torch.full((4, 8), float(rank if rank > 1 else 0)))


def test_replicas_may_differ() -> None:
    spawn(check_replicas, 4)


def check_overflow(rank: int, world_size: int, port: int) -> None:
    """Gradients that overflowed say nothing; the next pass is compared."""
    _launch(tensor={"size": 2, "mode": "1d"})
    model, x = _existing(), torch.ones(4, 8)
    (_loss(model, x) * torch.inf).backward()
    with pytest.raises(RuntimeError, match=r"different gradients"):
        _loss(model, x).backward()
    _loss(model, x).backward()  # it is said once
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, model.first_step.done)
    assert states == [True, True]


def test_overflow() -> None:
    spawn(check_overflow, 2)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _step(door: str, stage: nn.Module, batches: Any) -> None:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    criterion: Any = nn.functional.mse_loss
    if door == "engine":
        engine, *_ = colossalai.initialize(stage, optimizer, criterion, verbose=False)
        engine.execute_schedule(batches)
        return
    booster = Booster(device="cpu")
    model, boosted, criterion, *_ = booster.boost(stage, optimizer, criterion)
    booster.execute_pipeline(batches, model, criterion, boosted)


def check_pipeline(rank: int, world_size: int, port: int, door: str) -> None:
    _launch(pipeline=2)
    batches = iter([(torch.ones(4, 4), torch.full((4, 4), float(rank)))])
    with pytest.raises(
        ValueError, match=r"share one model \(pp=2\) and were given different batches: 'label'"
    ):
        _step(door, Stage(), batches)


@pytest.mark.parametrize("door", ["engine", "booster"])
def test_different_batches_in_a_pipeline(door: str) -> None:
    spawn(check_pipeline, 2, door=door)


def _alone(**place: Any) -> None:
    _launch()
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="2 data-parallel ranks, but Booster has no plugin.*plugin='ddp'"):
        Booster().boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Booster().boost(nn.Linear(2, 2))  # nothing is trained


def test_ranks_that_train_by_themselves_are_told() -> None:
    spawn(_alone, 2)
