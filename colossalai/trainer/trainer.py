"""``Trainer``: the loops of training, evaluation and prediction, with hooks at every turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from colossalai.checkpoint_io.files.training import STEP_IN_EPOCH, load_training
from colossalai.engine import Engine
from colossalai.engine.schedule import PipelineSchedule
from colossalai.interface.nest import to_device
from colossalai.logging import DistributedLogger, get_dist_logger
from colossalai.trainer.hooks import BaseHook
from colossalai.utils import MultiTimer, get_current_device
from colossalai.utils.parallel import is_first_of_stage

# ---- An iterator that knows whether there is more, and a progress bar over it ----

_NOTHING = object()


class Batches(Iterator[Any]):
    """The batches of one pass.  ``more`` looks at the next batch, which ``next`` then returns.

    So a ``StopIteration`` from inside the model is never taken for the end of the data.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self._batches = iter(dataloader)
        self._next: Any = _NOTHING

    def more(self) -> bool:
        if self._next is _NOTHING:
            self._next = next(self._batches, _NOTHING)
        return self._next is not _NOTHING

    def skip(self, count: int) -> None:
        """Pass over the first ``count`` batches, which an earlier run has seen."""
        for done in range(count):
            if next(self, _NOTHING) is _NOTHING:
                raise ValueError(
                    f"the checkpoint was written after {count} batches of the epoch, but train_dataloader has"
                    f" only {done}; resume with the data, batch size and number of ranks that it was written"
                    " with"
                )

    def __next__(self) -> Any:
        if not self.more():
            raise StopIteration
        batch, self._next = self._next, _NOTHING
        return batch


def length(dataloader: Any) -> int | None:
    """Batches in one pass, where that is known."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Let the sampler, or a stream itself, choose the order of ``epoch``, so that a resumed run sees the data
    in the same order.
    """
    for name in ("sampler", "batch_sampler", "dataset"):
        if callable(setter := getattr(getattr(dataloader, name, None), "set_epoch", None)):
            setter(epoch)


# ---- What a user may give the trainer, checked before anything runs ----


def check_fit(
    epochs: int, max_steps: int | None, test_interval: int, train_dataloader: Any, test_dataloader: Any
) -> None:
    """Refuse arguments of ``Trainer.fit`` that make no training."""
    for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
        if value is None and name == "max_steps":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"fit needs {name} as a whole number of at least 1, got {value!r}")
    check_dataloader("train_dataloader", train_dataloader, "fit")
    if test_dataloader is not None:
        check_dataloader("test_dataloader", test_dataloader, "fit")


def check_dataloader(name: str, dataloader: Any, who: str) -> None:
    """Refuse what cannot be iterated over, and what is known to have no batch."""
    if not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        raise TypeError(
            f"{who} needs {name} as a data loader or another iterable of batches, got {dataloader!r}"
        )
    check_steps(1 if (known := length(dataloader)) is None else known, name)


def check_steps(steps: int, name: str) -> None:
    """Refuse a pass over ``name`` that had no batch."""
    if steps == 0:
        raise ValueError(
            f"{name} gave no batch: is the dataset empty, smaller than the batch size with drop_last=True, or"
            " an iterator that was used up before?"
        )


def check_hooks(hooks: Sequence[BaseHook]) -> None:
    """Refuse what is no hook, or cannot be put in order."""
    for hook in hooks:
        if not isinstance(hook, BaseHook):
            made = " (a class: call it)" if isinstance(hook, type) else ""
            raise TypeError(f"hooks inherit colossalai.trainer.hooks.BaseHook, got {hook!r}{made}")
        if not isinstance(hook.priority, (int, float)):
            raise TypeError(
                f"the priority of a hook is a number, but {type(hook).__name__} has {hook.priority!r}"
            )


class Trainer:
    """Trains with an engine.

    ``states`` is where hooks leave what others may read: ``states['metrics']['train']`` and ``['test']`` hold
    the metrics by name, ``states['step_metrics']`` what the progress bar shows.

    Args:
        timer: measures epochs and steps as ``Train-epoch``, ``Train-step``, ``Test-epoch`` and ``Test-step``.
            Left out, a timer is made that is off until a hook needs it: measuring waits for the device.
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
        self.during_step = ExitStack()
        """Contexts that a hook enters before an iteration; they end with it, also when it fails."""
        self.hooks: list[BaseHook] = []
        self.states: dict[str, Any] = {}
        self._cur_epoch = 0
        self._cur_step = 0
        self._step_in_epoch = 0  # before fit: batches of the first epoch to pass over
        self._first_epoch = 0
        self._fitting = False
        self._stopped: str | None = None  # why a hook has ended this fit
        self._depth = 0  # runs inside runs: a hook may evaluate
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
        self._step_in_epoch = 0

    @property
    def cur_step(self) -> int:
        """Training iterations so far, over all epochs."""
        return self._cur_step

    @cur_step.setter
    def cur_step(self, step: int) -> None:
        self._cur_step = step

    @property
    def step_in_epoch(self) -> int:
        """Training iterations of the current epoch so far."""
        return self._step_in_epoch

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
        check_fit(epochs, max_steps, test_interval, train_dataloader, test_dataloader)
        if self._fitting:
            raise RuntimeError(
                "fit was called by a hook of a fit that still runs; a trainer trains one at a time"
            )
        self._max_epochs, self._max_steps = epochs, max_steps
        self._steps_per_epoch = length(train_dataloader)
        if self._first_epoch == self._step_in_epoch == 0:
            self._cur_step = 0
        self._warn_if_nothing_is_left(epochs)
        display_progress = display_progress and self._is_display_rank()
        self._fitting, self._stopped = True, None
        try:
            with self._attached(hooks):
                self._train(
                    train_dataloader, test_dataloader, test_interval, display_progress, return_output_label
                )
        finally:  # the next fit is a new one, even if this was interrupted
            self._fitting, self._first_epoch, self._step_in_epoch = False, 0, 0

    def stop_training(self, reason: str) -> None:
        """End the running ``fit`` after the current iteration or epoch; all ranks must call this together.

        The rest of the hooks, and ``after_train`` of all of them, are still called.
        """
        if not self._fitting:
            raise RuntimeError("stop_training is for a hook of a fit that runs")
        self._stopped = reason

    def resume(
        self, file: str | Path, lr_scheduler: LRScheduler | None = None, model: nn.Module | None = None
    ) -> None:
        """Load a checkpoint of ``SaveCheckpointHook``; the next ``fit`` goes on with the batch after it.

        Args:
            lr_scheduler: the scheduler of the training, if it has one.
            model: the model to load; that of the engine if left out.
        """
        if self._fitting:
            raise RuntimeError("resume was called by a hook of a fit that runs; call it before fit")
        state = load_training(file, model or self._engine.model, self._engine.optimizer, lr_scheduler)
        if lr_scheduler is None and "lr_scheduler" in state:
            self._logger.warning(
                f"{file} holds a learning-rate scheduler, but resume got none; pass it: resume(file,"
                " lr_scheduler)",
                ranks=[0],
            )
        seen = state.get(STEP_IN_EPOCH)
        self.cur_epoch = int(state["epoch"]) + (seen is None)  # without it, the epoch was at its end
        self.cur_step, self._step_in_epoch = int(state.get("step", 0)), seen or 0

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """One pass over ``test_dataloader`` without training.

        A hook may call this during ``fit``: ``hooks`` and their states then last for this pass only.
        """
        check_dataloader("test_dataloader", test_dataloader, "evaluate")
        with self._attached(hooks):
            self._test(
                test_dataloader,
                "Evaluation",
                display_progress and self._is_display_rank(),
                return_output_label,
            )

    def predict(self, data: Any) -> Any:
        """The output of the model for ``data``, a tensor or a list or dict of its arguments, in evaluation
        mode.

        In a pipeline every rank passes the same data, and the output is where the last layers are; elsewhere
        it is None.
        """
        device = next((p.device for p in self._engine.model.parameters()), get_current_device())
        data = to_device(data, device)
        with self._evaluation_mode(), torch.no_grad():
            if isinstance(schedule := self._engine.schedule, PipelineSchedule):
                return schedule.predict(data)
            if isinstance(data, dict):
                return self._engine(**data)
            return self._engine(*data) if isinstance(data, (list, tuple)) else self._engine(data)

    def _train(
        self,
        train_dataloader: Iterable[Any],
        test_dataloader: Iterable[Any] | None,
        test_interval: int,
        display_progress: bool,
        return_output_label: bool,
    ) -> None:
        self._call_hooks("before_train")
        for epoch in range(self._first_epoch, self._max_epochs or 0):
            if self._is_over():
                break
            self._cur_epoch = epoch
            self._train_epoch(train_dataloader, epoch, display_progress, return_output_label)
            if test_dataloader is not None and (epoch + 1) % test_interval == 0:
                self._test(test_dataloader, f"[Epoch {epoch} / Test]", display_progress, return_output_label)
        if self._stopped is not None:
            self._logger.info(f"Training is stopped: {self._stopped}", ranks=[0])
        elif self._is_over():
            self._logger.info(
                f"Max number of steps {self._max_steps} has been reached, training is stopped automatically",
                ranks=[0],
            )
        self._call_hooks("after_train")

    def _warn_if_nothing_is_left(self, epochs: int) -> None:
        if self._first_epoch >= epochs:
            epoch = self._first_epoch
            what = f"cur_epoch is {epoch} and epochs is {epochs}; epochs counts from the very first one"
        elif self._is_over():
            what = f"cur_step is {self._cur_step} and max_steps is {self._max_steps}"
        else:
            return
        self._logger.warning(f"fit has nothing left to train: {what}", ranks=[0])

    def _train_epoch(
        self, dataloader: Iterable[Any], epoch: int, display_progress: bool, return_output_label: bool
    ) -> None:
        self._engine.train()
        set_epoch(dataloader, epoch)
        batches = Batches(dataloader)
        batches.skip(self._step_in_epoch)
        bar = tqdm(
            desc=f"[Epoch {epoch} / Train]",
            total=self._steps_per_epoch,
            initial=self._step_in_epoch,
            disable=not display_progress,
        )
        self._call_hooks("before_train_epoch")
        self.timer.start("Train-epoch")
        with bar:
            while not self._is_over() and batches.more():
                self._train_step(batches, return_output_label)
                self._show(bar)
        check_steps(self._step_in_epoch, "train_dataloader")
        self.timer.stop("Train-epoch", keep_in_history=True)
        if not self._is_over():
            self._steps_per_epoch = self._step_in_epoch
        self._synchronize_metrics("train")
        self._call_hooks("after_train_epoch")
        if self.timer.is_on():
            self.timer.reset("Train-epoch")
        self._step_in_epoch = 0

    def _train_step(self, batches: Batches, return_output_label: bool) -> None:
        with ExitStack() as self.during_step:
            self._call_hooks("before_train_iter")
            self.timer.start("Train-step")
            self._engine.zero_grad()
            result = self._engine.execute_schedule(
                batches, forward_only=False, return_loss=True, return_output_label=return_output_label
            )
            self._engine.step()
            self.timer.stop("Train-step", keep_in_history=True)
        self._cur_step += 1
        self._step_in_epoch += 1
        self._call_hooks("after_train_iter", *result)

    def _test(
        self, dataloader: Iterable[Any], desc: str, display_progress: bool, return_output_label: bool
    ) -> None:
        with self._evaluation_mode():
            self._test_epoch(dataloader, desc, display_progress, return_output_label)

    def _test_epoch(
        self, dataloader: Iterable[Any], desc: str, display_progress: bool, return_output_label: bool
    ) -> None:
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
        check_steps(steps, "test_dataloader")
        self.timer.stop("Test-epoch", keep_in_history=True)
        self._synchronize_metrics("test")
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")
        if self.timer.is_on():
            self.timer.reset("Test-epoch")
            self.timer.reset("Test-step")

    def _test_step(self, batches: Batches, return_output_label: bool) -> None:
        with ExitStack() as self.during_step:
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

    @contextmanager
    def _attached(self, hooks: Sequence[BaseHook] | None) -> Iterator[None]:
        """With ``hooks`` and new states; a run inside another one gives both back to it."""
        check_hooks(hooks or ())
        outer = (self.hooks, self.states) if self._depth else None
        self.states = {}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        self._depth += 1
        try:
            for hook in self.hooks:
                hook.after_hook_is_attached(self)
            yield
        finally:
            self._depth -= 1
            # after the last run its states stay, to be read
            self.hooks, self.states = outer if outer is not None else ([], self.states)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The model in evaluation mode; afterwards each of its modules is in the mode it had."""
        training = self._engine.training
        modes = [(module, module.training) for module in self._engine.model.modules()]
        self._engine.eval()
        try:
            yield
        finally:
            self._engine.training = training
            for module, mode in modes:
                module.training = mode

    def _call_hooks(self, moment: str, *args: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *args)

    def _synchronize_metrics(self, mode: str) -> None:
        """All ranks together, here and nowhere else: a hook that reads a metric on one rank must not wait for
        others.
        """
        for metric in self.states.get("metrics", {}).get(mode, {}).values():
            metric.synchronize()

    def _is_display_rank(self) -> bool:
        return is_first_of_stage() and self._engine.schedule.has_loss

    def _is_over(self) -> bool:
        reached = self._max_steps is not None and self._cur_step >= self._max_steps
        return reached or self._stopped is not None
