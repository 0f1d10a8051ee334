"""A hook that evaluates, predicts or fails in the middle of ``fit`` leaves the trainer as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.engine import Engine
from colossalai.trainer import Trainer, hooks
from tests.engine.plans import loader, logged, mlp, sgd


def make_trainer() -> Trainer:
    model = nn.Sequential(mlp(), nn.Dropout(0.1))
    return Trainer(Engine(model, sgd(model.parameters()), nn.CrossEntropyLoss()))


def weight(trainer: Trainer) -> torch.Tensor:
    return next(trainer.engine.model.parameters()).detach().clone()


class Calls(hooks.BaseHook):
    """Does something after iterations, and keeps the steps and modes it saw."""

    def __init__(self, action: Any, at: int | None = None) -> None:
        super().__init__()
        self.action, self.at = action, at
        self.steps: list[int] = []
        self.modes: list[bool] = []

    def before_train_iter(self, trainer: Trainer) -> None:
        self.modes.append(trainer.engine.model.training and trainer.engine.training)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.steps.append(trainer.cur_step)
        if self.at in (None, trainer.cur_step):
            self.action(trainer)


def evaluate_in_the_middle(trainer: Trainer) -> None:
    before = (trainer.hooks, trainer.states, trainer.cur_epoch, trainer.cur_step, trainer.steps_per_epoch)
    inner = hooks.LossHook()
    trainer.evaluate(loader(4, 2), hooks=[inner])
    after = (trainer.hooks, trainer.states, trainer.cur_epoch, trainer.cur_step, trainer.steps_per_epoch)
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))
    assert inner not in trainer.hooks


def test_evaluate_in_a_hook_leaves_the_fit_as_it_was() -> None:
    calls, trainer = Calls(evaluate_in_the_middle), make_trainer()
    trainer.fit(loader(6, 2), 2, hooks=[calls, hooks.LossHook()])
    assert calls.steps == [1, 2, 3, 4, 5, 6]
    assert calls.modes == [True] * 6
    assert trainer.hooks == []
    # the states are those of the fit: its loss has three iterations, the inner one's had two
    assert trainer.states["metrics"]["train"]["Loss"]._count == 3


def test_evaluate_that_fails_in_a_hook_gives_back_too() -> None:
    def evaluate_badly(trainer: Trainer) -> None:
        with pytest.raises(ValueError, match="not \\(data, label\\)"):
            trainer.evaluate([(1, 2, 3)])

    calls, trainer = Calls(evaluate_badly), make_trainer()
    trainer.fit(loader(4, 2), 2, hooks=[calls])
    assert calls.steps == [1, 2, 3, 4]
    assert calls.modes == [True] * 4


def test_predict_in_a_hook_restores_the_mode_of_every_module() -> None:
    calls, trainer = Calls(lambda t: t.predict(torch.ones(2, 6)), at=1), make_trainer()
    trainer.fit(loader(6, 2), 1, hooks=[calls])
    assert calls.modes == [True] * 3

    frozen = trainer.engine.model[1]  # type: ignore[index]
    frozen.eval()
    trainer.predict(torch.ones(2, 6))
    trainer.evaluate(loader(2, 2))
    assert trainer.engine.model.training
    assert not frozen.training
    trainer.engine.eval()
    trainer.evaluate(loader(2, 2))
    assert not trainer.engine.model.training
    assert not trainer.engine.training


def test_fit_in_a_hook_of_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="fit was called by a hook of a fit that still runs"):
        make_trainer().fit(loader(4, 2), 1, hooks=[Calls(lambda t: t.fit(loader(4, 2), 1))])


def test_after_an_interrupt_the_next_fit_trains_from_the_start() -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer()
    trainer.cur_epoch = 2
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(loader(4, 2), 4, hooks=[Calls(interrupt)])
    assert trainer.hooks == []
    before = weight(trainer)
    trainer.fit(loader(4, 2), 1)
    assert trainer.cur_step == 2
    assert not torch.equal(before, weight(trainer))


def test_nothing_left_to_train_is_said() -> None:
    trainer = make_trainer()
    trainer.cur_epoch = 5
    before = weight(trainer)
    with logged() as messages:
        trainer.fit(loader(4, 2), 3)
    assert any("nothing left to train: cur_epoch is 5 and epochs is 3" in message for message in messages)
    trainer.cur_epoch, trainer.cur_step = 1, 4
    with logged() as messages:
        trainer.fit(loader(4, 2), 3, max_steps=4)
    assert "fit has nothing left to train: cur_step is 4 and max_steps is 4" in messages
    assert torch.equal(before, weight(trainer))
    trainer.fit(loader(4, 2), 1)
    assert not torch.equal(before, weight(trainer))
