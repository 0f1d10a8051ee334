"""What goes wrong in training scripts, through both doors: a clear error, or the documented behaviour; never
silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16NaiveMixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context.config import ConfigException
from colossalai.engine import Engine
from colossalai.engine.features import Features
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from tests.engine.plans import initialize, launch, loader, logged, mlp, on_device, sgd

Criterion = Callable[..., Any]
CROSS_ENTROPY = nn.CrossEntropyLoss()


class Partial(nn.Module):
    """A part of it takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = mlp(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def by_booster(
    model: nn.Module, criterion: Criterion = CROSS_ENTROPY, data: Any = None, **options: Any
) -> None:
    """A training loop with a booster."""
    booster = Booster(device="cpu", **options)
    model, optimizer, _, dataloader, _ = booster.boost(  # type: ignore[assignment]
        model, sgd(model.parameters()), None, loader(8, 4) if data is None else data
    )
    for x, y in dataloader:  # type: ignore[union-attr]
        optimizer.zero_grad()
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()


def by_engine(model: nn.Module, criterion: Criterion = CROSS_ENTROPY, data: Any = None) -> None:
    """The documented loop with an engine."""
    engine = Engine(model, sgd(model.parameters()), criterion, clip_grad_norm=1.0)
    for x, y in loader(8, 4) if data is None else data:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))  # type: ignore[misc]
        engine.step()


def by_trainer(model: nn.Module, criterion: Criterion = CROSS_ENTROPY, data: Any = None) -> None:
    engine = Engine(model, sgd(model.parameters()), criterion, clip_grad_norm=1.0)
    Trainer(engine).fit(loader(8, 4) if data is None else data, epochs=1)


DOORS = pytest.mark.parametrize("train", [by_booster, by_engine, by_trainer])


@DOORS
def test_a_criterion_that_returns_a_tuple(train: Callable[..., None]) -> None:
    def pair(output: Tensor, label: Tensor) -> tuple[Tensor, int]:
        return CROSS_ENTROPY(output, label), 3

    with pytest.raises(TypeError, match=r"(needs|must return) the loss as one tensor.* got (a )?tuple"):
        train(mlp(), pair)


@DOORS
def test_a_criterion_that_does_not_reduce(train: Callable[..., None]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"one element.* got a tensor of shape \(4,\)"):
        train(mlp(), nn.CrossEntropyLoss(reduction="none"))


@DOORS
def test_a_frozen_model(train: Callable[..., None]) -> None:
    with pytest.raises(RuntimeError, match=r"loss does not depend on a parameter to train.* frozen"):
        train(mlp().requires_grad_(False))


@DOORS
def test_a_parameter_without_gradient_keeps_its_value(train: Callable[..., None]) -> None:
    model = Partial()
    before = [p.detach().clone() for p in model.parameters()]
    train(model)
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [True] * 4 + [False] * 2


@DOORS
def test_a_loss_that_is_nan_is_reported_once(train: Callable[..., None]) -> None:
    model = mlp()
    with logged() as messages:
        train(model, lambda output, label: CROSS_ENTROPY(output, label) * float("nan"), loader(16, 4))
    assert "".join(messages).count("the loss is nan or infinite (backward pass 1)") == 1
    assert all(p.isnan().all() for p in model.parameters()), "reported, not changed"


def test_an_empty_dataloader() -> None:
    empty = DataLoader(TensorDataset(torch.ones(3, 6)), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"dataloader of boost is empty: .* drop_last=True"):
        by_booster(mlp(), data=empty)
    with pytest.raises(ValueError, match="train_dataloader gave no batch"):
        by_trainer(mlp(), data=empty)


def test_a_schedule_stepped_past_its_end() -> None:
    for precision in (None, "fp16"):
        model = mlp()
        raw = sgd(model.parameters())
        boosted = Booster(device="cpu", mixed_precision=precision).boost(
            model, raw, lr_scheduler=CosineAnnealingLR(raw, total_steps=2)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                boosted.optimizer.zero_grad()
                boosted.optimizer.backward(boosted.model(torch.ones(2, 6)).float().mean())
                boosted.optimizer.step()
                boosted.lr_scheduler.step()  # type: ignore[union-attr]
        ended = [w for w in caught if "ended after total_steps=2 and is stepped further" in str(w.message)]
        assert len(ended) == 1
    model = mlp()
    raw = sgd(model.parameters())
    hook = hooks.LRSchedulerHook(torch.optim.lr_scheduler.CosineAnnealingLR(raw, T_max=2), by_epoch=False)
    with logged() as messages:
        Trainer(Engine(model, raw, CROSS_ENTROPY)).fit(loader(20, 4), epochs=1, hooks=[hook])
    assert "".join(messages).count("was made for 2 steps and is stepped beyond its end") == 1


def test_sections_of_a_config_that_exclude_each_other() -> None:
    for mode in AMP_TYPE:
        with pytest.raises(ConfigException, match=r"both 'fp16' and 'zero'.* keep one of them"):
            Features.from_config({"fp16": {"mode": mode}, "zero": {}})


def _plugins(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    plugin = TorchFSDPPlugin()
    for precision in ("fp16_naive", FP16NaiveMixedPrecision()):
        with pytest.raises(ValueError, match="TorchFSDPPlugin does not support mixed_precision='fp16_naive'"):
            Booster(device="cpu", mixed_precision=precision, plugin=plugin)
    with pytest.raises(RuntimeError, match=r"loss does not depend on a parameter to train.* frozen"):
        by_booster(mlp().requires_grad_(False), plugin=TorchDDPPlugin())
    engine, data, *_ = initialize(model=mlp().requires_grad_(False), train_dataloader=loader(8, 4))
    with pytest.raises(RuntimeError, match=r"loss does not depend on a parameter to train.* frozen"):
        Trainer(engine).fit(data, epochs=1)


def test_plugins_refuse_the_same() -> None:
    spawn(_plugins, 2)


def _unused(rank: int, world_size: int, port: int) -> None:
    """DDP waits for every gradient; torch says so, and how to allow it."""
    launch(port, {}, rank, world_size)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        by_booster(Partial(), plugin=TorchDDPPlugin())
    engine, data, *_ = initialize(model=Partial(), train_dataloader=loader(8, 4))
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        Trainer(engine).fit(data, epochs=1)
    by_booster(Partial(), plugin=TorchDDPPlugin(find_unused_parameters=True))
    handlers = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}
    for config in ({"torch_ddp": {"find_unused_parameters": True}}, handlers):
        engine, *_ = initialize(config, model=Partial())
        for x, y in loader(8, 4):
            x, y = on_device(x, y)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))  # type: ignore[misc]
            engine.step()


def test_a_parameter_without_gradient_under_data_parallelism() -> None:
    spawn(_unused, 2)
