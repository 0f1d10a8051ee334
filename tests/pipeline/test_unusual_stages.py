"""Stages without parameters, or with none to train, or that ZeRO cannot divide for another reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.builder import build_pipeline_model
from colossalai.context import ParallelMode
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.pipeline.stage import Placement, launched_shape
from colossalai.testing import parameterize, spawn
from colossalai.testing.pipelined import cut
from tests.engine.plans import logged
from tests.pipeline.plans import HIDDEN, config, launch, problem
from tests.pipeline.test_engine import SCHEDULES


def _serial(kind: str) -> nn.Sequential:
    """Of four layers, the second has nothing to train, and with one chunk neither has a whole rank."""
    torch.manual_seed(0)
    idle = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False) if kind == "frozen" else nn.Tanh()
    return nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), idle, nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    )


def _stages(kind: str, empty: int) -> nn.Sequential:
    """Two stages of which the one numbered ``empty`` has nothing to train."""
    layers = list(_serial(kind))[:2]
    return nn.Sequential(*(layers if empty == 1 else reversed(layers)))


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_grad_norm": 0.01},
    "fp16": {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 64}, "clip_grad_norm": 0.01},
    "accumulated": {"gradient_accumulation": 2},
}


@parameterize("schedule", ["gpipe", "1f1b", "zbh1"])
@parameterize("kind", ["none", "frozen"])
@parameterize("empty", [0, 1])
@parameterize("features", list(FEATURES))
def check_empty(
    rank: int, world_size: int, port: int, schedule: str, kind: str, empty: int, features: str
) -> None:
    settings = config(schedule, 2, 4, 1, **FEATURES[features])
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    own = _stages(kind, empty)[rank]
    engine, *_ = colossalai.initialize(
        own, lambda params: torch.optim.SGD(params, lr=0.1), nn.CrossEntropyLoss(), verbose=False
    )
    serial = _stages(kind, empty)
    reference = torch.optim.SGD(serial.parameters(), lr=0.1)
    x, y = problem().batches[0]
    for i in range(2):
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(x, y)]))[2]
        engine.step()
        expected = nn.functional.cross_entropy(serial(x), y)
        (expected / (2 if features == "accumulated" else 1)).backward()
        if features in ("clipped", "fp16"):
            nn.utils.clip_grad_norm_(serial.parameters(), 0.01)
        if features != "accumulated" or i == 1:
            reference.step()
            reference.zero_grad()
        if loss is not None:
            rough = {"rtol": 1e-2, "atol": 1e-3} if features == "fp16" else {}
            torch.testing.assert_close(loss, expected.detach(), **rough)
    for p, q in zip(own.parameters(), serial[rank].parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=1e-2 if features == "fp16" else 1e-5, atol=1e-3)


def test_a_stage_without_anything_to_train() -> None:
    spawn(check_empty, 2)


@parameterize("schedule", list(SCHEDULES))
def check_booster(rank: int, world_size: int, port: int, schedule: str) -> None:
    """With an optimizer of nothing, which the user makes of an empty group."""
    chunks = SCHEDULES[schedule]
    settings = config(schedule, 2, 4, chunks)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    gpc.check_sanity()
    serial = nn.Sequential(*(nn.Tanh() if i % 2 else layer for i, layer in enumerate(_serial("none"))))
    if chunks == 1:
        serial = serial[:2]
    stages = cut(serial, Placement(2, chunks, launched_shape()), rank)
    model = stages[0] if chunks == 1 else nn.ModuleList(stages)
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1)
    booster = Booster(device="cpu")
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    x, y = problem().batches[0]
    losses = []
    for _ in range(3):
        losses.append(booster.execute_pipeline(iter([(x, y)]), model, criterion, optimizer)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    if losses[0] is not None:
        assert losses[2] < losses[1] < losses[0]


def test_an_optimizer_of_nothing() -> None:
    spawn(check_booster, 2)


@parameterize("level", [1, 2, 3])
@parameterize("kind", ["none", "frozen"])
def check_zero(rank: int, world_size: int, port: int, level: int, kind: str) -> None:
    settings = config("1f1b", 2, 4, 1, zero={"level": level})
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    told = (
        r"cannot divide the model: there is an optimizer without parameters to train.*\(rank 1 of the"
        r" pipeline\)"
    )
    with pytest.raises(ConfigException, match=told):
        colossalai.initialize(
            _stages(kind, 1)[rank], lambda params: torch.optim.SGD(params, lr=0.1), verbose=False
        )


def test_zero_refuses_it_on_every_rank() -> None:
    spawn(check_zero, 2)


@parameterize("kind", ["none", "frozen"])
def check_zero_plugin(rank: int, world_size: int, port: int, kind: str) -> None:
    """The plugin itself, with an optimizer of nothing."""
    settings = config("1f1b", 2, 4, 1)
    if not gpc.is_initialized(ParallelMode.GLOBAL):
        launch(settings)
    gpc.load_config(settings)
    model = _stages(kind, 1)[rank]
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1)
    told = (
        r"cannot divide the model: there is an optimizer without parameters to train.*\(rank 1 of the"
        r" pipeline\)"
    )
    with pytest.raises(ValueError, match=told):
        Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="fp32")).boost(model, optimizer)


def test_the_plugin_of_zero_refuses_it_on_every_rank() -> None:
    spawn(check_zero_plugin, 2)


def check_warning(rank: int, world_size: int, port: int) -> list[str]:
    launch(config("1f1b", 2, 2))
    with logged() as messages:
        build_pipeline_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        build_pipeline_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)))
    return [text for text in messages if "without parameters" in text]


def test_a_partition_with_such_a_stage_is_told() -> None:
    (told,), others = spawn(check_warning, 2)
    assert "rank 1 of the pipeline gets layers without parameters" in told
    assert "pass the class of the optimizer to colossalai.initialize" in told
    assert others == []
