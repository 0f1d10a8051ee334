"""A scheduler counts updates of the optimizer: steps that fp16 skipped are none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from colossalai.booster import Booster
from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.interface import LRSchedulerWrapper
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.testing import spawn
from colossalai.trainer import Trainer, hooks
from tests.engine.plans import initialize, launch

FP16 = pytest.mark.parametrize("precision", [name for name in PRECISIONS if name.startswith("fp16")])
# the precision that a config calls by this name
MODES = ("torch", "naive", "apex")


def _counting(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Its rate is 1 / (1 + number of its steps)."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _boost(precision: str | None) -> tuple[Any, Any, Any, Booster]:
    model = nn.Linear(4, 2)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    booster = Booster(device="cpu", mixed_precision=precision)
    model, optimizer, _, _, scheduler = booster.boost(model, raw, lr_scheduler=_counting(raw))  # type: ignore[assignment]
    return model, optimizer, scheduler, booster


def _iterate(model: Any, optimizer: Any, bad: bool) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(3, 4)).float().mean() * (float("inf") if bad else 1.0))
    optimizer.step()


@FP16
def test_by_iteration_the_steps_are_the_updates(precision: str) -> None:
    model, optimizer, scheduler, _ = _boost(precision)
    updates, seen = [], []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's "lr_scheduler.step() before optimizer.step()"
        for bad in (True, False, True, True, False, False):
            _iterate(model, optimizer, bad)
            scheduler.step()
            assert optimizer.step_was_skipped == bad
            assert scheduler.last_epoch == len(updates)
            seen.append(optimizer.param_groups[0]["lr"])
    assert len(updates) == 3
    assert seen == [1.0, 1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 4]
    assert scheduler.get_last_lr() == [1 / 4]


@FP16
def test_by_epoch_it_steps_if_the_epoch_had_an_update(precision: str) -> None:
    model, optimizer, scheduler, _ = _boost(precision)
    for epoch, steps in (((False, True), 1), ((True, False), 2), ((True, True), 2)):
        for bad in epoch:
            _iterate(model, optimizer, bad)
        scheduler.step()
        assert scheduler.last_epoch == steps


def test_a_scheduler_that_did_not_go_through_boost_counts_its_calls() -> None:
    model = nn.Linear(4, 2)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = _counting(raw)
    boosted, optimizer, *_ = Booster(device="cpu", mixed_precision="fp16").boost(model, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _iterate(boosted, optimizer, bad=True)
        scheduler.step()
    assert scheduler.last_epoch == 1  # what the tests above would find without the wrapper


def test_without_fp16_the_scheduler_is_the_users() -> None:
    for precision in (None, "bf16"):
        _, optimizer, scheduler, _ = _boost(precision)
        assert type(scheduler) is LambdaLR
        assert not optimizer.skips_steps
        assert not optimizer.step_was_skipped


def test_the_wrapper_passes_for_what_is_inside(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    inner = LinearWarmupLR(raw, total_steps=10, warmup_steps=3)
    booster = Booster(device="cpu", mixed_precision="fp16")
    boosted, optimizer, _, _, scheduler = booster.boost(model, raw, lr_scheduler=inner)
    assert isinstance(scheduler, LRSchedulerWrapper)
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.total_steps == 10
    for bad in (False, True, False):
        _iterate(boosted, optimizer, bad)
        scheduler.step()
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler")
    other = LinearWarmupLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), 10, 3)
    booster.load_lr_scheduler(other, tmp_path / "scheduler")
    assert (other.last_epoch, other.get_last_lr()) == (2, inner.get_last_lr())
    scheduler.load_state_dict(other.state_dict() | {"last_epoch": 1})
    assert inner.last_epoch == scheduler.last_epoch == 1
    with pytest.raises(AttributeError, match="wraps no scheduler yet"):
        _ = LRSchedulerWrapper.__new__(LRSchedulerWrapper).total_steps


def test_arguments_of_step_arrive() -> None:
    model = nn.Linear(4, 2)
    raw = torch.optim.SGD(model.parameters(), lr=1.0)
    booster = Booster(device="cpu", mixed_precision="fp16")
    boosted, optimizer, _, _, scheduler = booster.boost(
        model, raw, lr_scheduler=ReduceLROnPlateau(raw, patience=0, factor=0.5)
    )
    for loss in (1.0, 2.0):
        _iterate(boosted, optimizer, bad=False)
        scheduler.step(loss)  # type: ignore[union-attr]
    assert raw.param_groups[0]["lr"] == 0.5


class _Seen(hooks.BaseHook):
    """The number of steps of the scheduler and of the optimizer after each iteration."""

    def __init__(self, scheduler: Any, raw: torch.optim.Optimizer) -> None:
        super().__init__(priority=20)
        self.scheduler, self.updates = scheduler, 0
        self.steps: list[tuple[int, int]] = []
        raw.register_step_post_hook(self.count)

    def count(self, *_: Any) -> None:
        self.updates += 1

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self.steps.append((self.scheduler.last_epoch, self.updates))


def _trainer(rank: int, world_size: int, port: int) -> None:
    launch(port)
    bad, good = torch.full((2, 6), float("inf")), torch.ones(2, 6)
    batches = [(x, torch.zeros(2, dtype=torch.long)) for x in (bad, good, good, good, bad, bad)]
    for mode in MODES:
        for accumulate, expected in ((1, [0, 1, 2, 3, 3, 3]), (2, [0, 0, 0, 1, 1, 1]), (3, [0] * 6)):
            for by_epoch in (False, True):
                model = nn.Linear(6, 3)
                raw = torch.optim.SGD(model.parameters(), lr=0.1)
                config = {"fp16": {"mode": mode}, "gradient_accumulation": accumulate}
                engine, data, _, scheduler = initialize(
                    config,
                    model=model,
                    optimizer=raw,
                    train_dataloader=batches,
                    lr_scheduler=_counting(raw),
                )
                seen = _Seen(scheduler, raw)
                hook = hooks.LRSchedulerHook(scheduler, by_epoch=by_epoch)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    Trainer(engine).fit(data, epochs=1, hooks=[hook, seen])
                updates = [n for _, n in seen.steps]
                assert updates == expected, (mode, accumulate)
                if by_epoch:
                    assert scheduler.last_epoch == int(
                        updates[-1] > 0
                    )  # an epoch of skipped steps does not count
                else:
                    assert [n for n, _ in seen.steps] == updates, (mode, accumulate)


def test_the_trainer_keeps_scheduler_and_optimizer_together() -> None:
    spawn(_trainer, 1)
