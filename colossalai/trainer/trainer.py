"""``Trainer``: the loops of training, evaluation and prediction, with hooks at every turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from colossalai.engine import Engine
from colossalai.engine.schedule import PipelineSchedule
from colossalai.interface.nest import to_device
from colossalai.logging import DistributedLogger, get_dist_logger
from colossalai.trainer.batches import Batches, length, set_epoch
from colossalai.trainer.hooks import BaseHook
from colossalai.utils import (
    MultiTimer,
    get_current_device,
    is_dp_rank_0,
    is_tp_rank_0,
)


class Trainer:
    """Trains with an engine.

    ``states`` is where hooks leave what others may read: ``states['metrics']['train']`` and ``['test']`` hold the
    metrics by name, ``states['step_metrics']`` what the progress bar shows.

    Args:
        timer: measures epochs and steps as ``Train-epoch``, ``Train-step``, ``Test-epoch`` and ``Test-step``.  Left
            out, a timer is made that is off until a hook needs it: measuring waits for the device.
        logger: the logger of ``get_dist_logger()`` if left out.
    """

    def __init__(
        self, engine: Engine, timer: MultiTimer | None = None, logger: DistributedLogger | None = None
    ) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(
                f"Trainer needs the engine that colossalai.initialize returned, got {type(engine).__name__}"
            )
        self._engine = engine
        self._logger = logger or get_dist_logger()
        self.timer = timer if timer is not None else MultiTimer(on=False)
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}
        self._cur_epoch = 0
        self._cur_step = 0
        self._first_epoch = 0
        self._max_epochs: int | None = None
        self._max_steps: int | None = None
        self._steps_per_epoch: int | None = None

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def cur_epoch(self) -> int:
        """The current epoch, from 0.  Set it before ``fit`` to resume there."""
        return self._cur_epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"cur_epoch is the epoch to begin with, 0 or more; got {epoch!r}")
        self._cur_epoch = self._first_epoch = epoch

    @property
    def cur_step(self) -> int:
        """Training iterations so far, over all epochs."""
        return self._cur_step

    @cur_step.setter
    def cur_step(self, step: int) -> None:
        self._cur_step = step

    @property
    def max_epochs(self) -> int | None:
        return self._max_epochs

    @property
    def max_steps(self) -> int | None:
        return self._max_steps

    @property
    def steps_per_epoch(self) -> int | None:
        """Iterations in one pass over the training data; None until known."""
        return self._steps_per_epoch

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train for ``epochs`` passes over ``train_dataloader``, or ``max_steps`` iterations if that is less.

        Args:
            test_dataloader: evaluated every ``test_interval`` epochs.
            hooks: called in the order of their priority, the smallest first.
            display_progress: show a progress bar on the first rank.
            return_output_label: give hooks the outputs and labels of each iteration, or None for both.
        """
        _check_fit(epochs, max_steps, test_interval, train_dataloader, test_dataloader)
        self._max_epochs, self._max_steps = epochs, max_steps
        self._steps_per_epoch = length(train_dataloader)
        if self._first_epoch == 0:
            self._cur_step = 0
        display_progress = display_progress and self._is_display_rank()
        self._attach(hooks)
        self._call_hooks("before_train")
        for epoch in range(self._first_epoch, epochs):
            self._cur_epoch = epoch
            self._train_epoch(train_dataloader, epoch, display_progress, return_output_label)
            if test_dataloader is not None and (epoch + 1) % test_interval == 0:
                self._test(test_dataloader, f"[Epoch {epoch} / Test]", display_progress, return_output_label)
            if self._is_over():
                self._logger.info(
                    f"Max number of steps {max_steps} has been reached, training is stopped automatically",
                    ranks=[0],
                )
                break
        self._call_hooks("after_train")
        self._first_epoch = 0
        self._detach()

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """One pass over ``test_dataloader`` without training."""
        _check_not_empty("test_dataloader", test_dataloader)
        self._attach(hooks)
        self._test(
            test_dataloader, "Evaluation", display_progress and self._is_display_rank(), return_output_label
        )
        self._detach()

    def predict(self, data: Any) -> Any:
        """The output of the model for ``data``, a tensor or a list or dict of its arguments, in evaluation mode.

        In a pipeline every rank passes the same data, and the output is where the last layers are; elsewhere it is None.
        """
        self._engine.eval()
        device = next((p.device for p in self._engine.model.parameters()), get_current_device())
        data = to_device(data, device)
        if isinstance(schedule := self._engine.schedule, PipelineSchedule):
            return schedule.predict(data)
        with torch.no_grad():
            if isinstance(data, dict):
                return self._engine(**data)
            return self._engine(*data) if isinstance(data, (list, tuple)) else self._engine(data)

    def _train_epoch(
        self, dataloader: Iterable[Any], epoch: int, display_progress: bool, return_output_label: bool
    ) -> None:
        self._engine.train()
        set_epoch(dataloader, epoch)
        batches = Batches(dataloader)
        bar = tqdm(desc=f"[Epoch {epoch} / Train]", total=self._steps_per_epoch, disable=not display_progress)
        self._call_hooks("before_train_epoch")
        self.timer.start("Train-epoch")
        steps = 0
        with bar:
            while not self._is_over() and batches.more():
                self._train_step(batches, return_output_label)
                steps += 1
                self._show(bar)
        _check_steps(steps, "train_dataloader")
        self.timer.stop("Train-epoch", keep_in_history=True)
        if not self._is_over():
            self._steps_per_epoch = steps
        self._synchronize_metrics("train")
        self._call_hooks("after_train_epoch")
        if self.timer.is_on():
            self.timer.reset("Train-epoch")

    def _train_step(self, batches: Batches, return_output_label: bool) -> None:
        self._call_hooks("before_train_iter")
        self.timer.start("Train-step")
        self._engine.zero_grad()
        result = self._engine.execute_schedule(
            batches, forward_only=False, return_loss=True, return_output_label=return_output_label
        )
        self._engine.step()
        self.timer.stop("Train-step", keep_in_history=True)
        self._cur_step += 1
        self._call_hooks("after_train_iter", *result)

    def _test(
        self, dataloader: Iterable[Any], desc: str, display_progress: bool, return_output_label: bool
    ) -> None:
        self._engine.eval()
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        self.timer.start("Test-epoch")
        batches = Batches(dataloader)
        steps = 0
        with tqdm(desc=desc, total=length(dataloader), disable=not display_progress) as bar:
            while batches.more():
                self._test_step(batches, return_output_label)
                steps += 1
                self._show(bar)
        _check_steps(steps, "test_dataloader")
        self.timer.stop("Test-epoch", keep_in_history=True)
        self._synchronize_metrics("test")
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")
        if self.timer.is_on():
            self.timer.reset("Test-epoch")
            self.timer.reset("Test-step")

    def _test_step(self, batches: Batches, return_output_label: bool) -> None:
        self._call_hooks("before_test_iter")
        self.timer.start("Test-step")
        result = self._engine.execute_schedule(
            batches, forward_only=True, return_loss=True, return_output_label=return_output_label
        )
        self.timer.stop("Test-step", keep_in_history=True)
        self._call_hooks("after_test_iter", *result)

    def _show(self, bar: tqdm) -> None:
        bar.update()
        if "step_metrics" in self.states:
            bar.set_postfix(**self.states["step_metrics"])

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                made = " (a class: call it)" if isinstance(hook, type) else ""
                raise TypeError(f"hooks inherit colossalai.trainer.hooks.BaseHook, got {hook!r}{made}")
        self.states = {}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        for hook in self.hooks:
            hook.after_hook_is_attached(self)

    def _detach(self) -> None:
        self.hooks = []

    def _call_hooks(self, moment: str, *args: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *args)

    def _synchronize_metrics(self, mode: str) -> None:
        """All ranks together, here and nowhere else: a hook that reads a metric on one rank must not wait for others."""
        for metric in self.states.get("metrics", {}).get(mode, {}).values():
            metric.synchronize()

    def _is_display_rank(self) -> bool:
        return is_dp_rank_0() and is_tp_rank_0() and self._engine.schedule.has_loss

    def _is_over(self) -> bool:
        return self._max_steps is not None and self._cur_step >= self._max_steps


def _check_fit(
    epochs: int, max_steps: int | None, test_interval: int, train_dataloader: Any, test_dataloader: Any
) -> None:
    for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"fit needs {name} as a whole number of at least 1, got {value!r}")
    _check_not_empty("train_dataloader", train_dataloader)
    if test_dataloader is not None:
        _check_not_empty("test_dataloader", test_dataloader)


def _check_not_empty(name: str, dataloader: Any) -> None:
    _check_steps(1 if (known := length(dataloader)) is None else known, name)


def _check_steps(steps: int, name: str) -> None:
    if steps == 0:
        raise ValueError(
            f"{name} gave no batch: is the dataset empty, smaller than the batch size with drop_last=True, or an"
            " iterator that was used up before?"
        )
