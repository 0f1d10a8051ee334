"""A checkpoint from any iteration goes on exactly: the same batches, steps and learning rates as without the
break.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from colossalai.engine import Engine
from colossalai.engine.gradient_accumulation import accumulate_gradient
from colossalai.logging import get_dist_logger
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader, load_checkpoint
from tests.engine.plans import data, logged, mlp, sgd

EPOCHS, BATCHES = 2, 5


class Losses(hooks.BaseHook):
    """The loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: dict[int, float] = {}

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.by_step[trainer.cur_step] = loss.item()


class Run:
    """Everything of one training run."""

    def __init__(self, accumulate: int, by_epoch: bool) -> None:
        model = mlp()
        optimizer = sgd(model.parameters())
        self.scheduler: Any = StepLR(optimizer, 1, gamma=0.8)
        self.loader: Any = get_dataloader(data(2 * BATCHES), shuffle=True, batch_size=2)
        if accumulate > 1:
            optimizer, self.loader, _, self.scheduler = accumulate_gradient(  # type: ignore[assignment]
                model, optimizer, self.loader, accumulate, None, self.scheduler
            )
        self.trainer = Trainer(Engine(model, optimizer, nn.CrossEntropyLoss()), MultiTimer())
        self.by_epoch, self.losses = by_epoch, Losses()

    def fit(self, *more: hooks.BaseHook, loader: Any = None) -> None:
        attached = [hooks.LRSchedulerHook(self.scheduler, self.by_epoch), self.losses, *more]
        self.trainer.fit(loader or self.loader, EPOCHS, hooks=attached)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.trainer.engine.model.parameters()])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # resumed at the end of an epoch
@pytest.mark.parametrize(("accumulate", "by_epoch"), [(1, False), (1, True), (2, False), (2, True)])
def test_every_iteration_can_be_gone_on_from(tmp_path: Path, accumulate: int, by_epoch: bool) -> None:
    whole = Run(accumulate, by_epoch)
    whole.fit(hooks.SaveCheckpointHook(1, tmp_path, save_by_iter=True))
    for step in (1, 3, BATCHES, BATCHES + 2):
        resumed = Run(accumulate, by_epoch)
        resumed.trainer.resume(tmp_path / f"epoch_{(step - 1) // BATCHES}_step_{step}.pt", resumed.scheduler)
        begins_after = resumed.trainer.cur_step
        assert step - accumulate < begins_after <= step
        resumed.fit(*everything_that_looks_at_an_epoch(resumed.trainer))
        assert torch.equal(resumed.weights(), whole.weights())
        assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
        assert resumed.losses.by_step == {s: v for s, v in whole.losses.by_step.items() if s > begins_after}
        assert resumed.trainer.cur_step == whole.trainer.cur_step


def everything_that_looks_at_an_epoch(trainer: Trainer) -> Iterator[hooks.BaseHook]:
    """An epoch that was saved after its last batch has an end, but no iteration."""
    logger = get_dist_logger()
    yield from (hooks.LossHook(), hooks.AccuracyHook(Accuracy()), hooks.ThroughputHook())
    yield from (hooks.LogMetricByEpochHook(logger), hooks.LogTimingByEpochHook(trainer.timer, logger))


def test_a_checkpoint_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    whole, resumed = Run(1, True), Run(1, True)
    whole.fit(hooks.SaveCheckpointHook(1, tmp_path))
    resumed.trainer.resume(tmp_path / "epoch_0.pt", resumed.scheduler)
    assert (resumed.trainer.cur_epoch, resumed.trainer.cur_step) == (1, BATCHES)
    resumed.fit()
    assert torch.equal(resumed.weights(), whole.weights())


def test_what_resume_says(tmp_path: Path) -> None:
    run = Run(1, True)
    run.fit(hooks.SaveCheckpointHook(3, tmp_path, save_by_iter=True))
    file = tmp_path / "epoch_0_step_3.pt"
    with logged() as messages:
        run.trainer.resume(file)
    assert any("holds a learning-rate scheduler, but resume got none" in message for message in messages)
    message = (
        r"after 3 batches of the epoch, but train_dataloader has only 1; resume with the data, batch size"
    )
    with pytest.raises(ValueError, match=message):
        run.fit(loader=get_dataloader(data(2), batch_size=2))
    with logged() as messages:
        assert load_checkpoint(file, run.trainer.engine.model) == 0
    assert any("within epoch 0, after 3 of its batches" in message for message in messages)


def test_resume_in_a_hook_is_refused(tmp_path: Path) -> None:
    class Resume(hooks.BaseHook):
        def before_train(self, trainer: Trainer) -> None:
            trainer.resume(tmp_path)

    with pytest.raises(RuntimeError, match="resume was called by a hook of a fit that runs"):
        Run(1, True).fit(Resume())
