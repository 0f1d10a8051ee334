"""Hooks that act on the training itself: learning rates, checkpoints, and a record of the pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io.files.training import STEP_IN_EPOCH
from colossalai.engine.gradient_accumulation import GradAccumOptimizer
from colossalai.logging import get_dist_logger
from colossalai.pipeline.recording import Recording, record_run
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.metrics import LearningRateMetric
from colossalai.utils import save_checkpoint

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


@HOOKS.register_module
class LRSchedulerHook(BaseHook):
    """Steps ``lr_scheduler`` after each epoch, or after each iteration.

    Args:
        store_lr_in_state: show the learning rate as the metric ``LR``.
    """

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        if not callable(getattr(lr_scheduler, "step", None)):
            raise TypeError(
                f"LRSchedulerHook needs a learning-rate scheduler, got {lr_scheduler!r}; did you pass it to"
                " initialize?"
            )
        if not isinstance(by_epoch, bool):
            raise TypeError(
                "LRSchedulerHook needs by_epoch as True (a step after each epoch) or False (after each"
                f" iteration), got {by_epoch!r}"
            )
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self._metric = LearningRateMetric(epoch_only=by_epoch) if store_lr_in_state else None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not _drives(self.lr_scheduler, trainer.engine.optimizer):
            raise ValueError(
                f"LRSchedulerHook got a {type(self.lr_scheduler).__name__} of another optimizer than the"
                " engine's; its learning rates would reach nothing. Build it on the optimizer that goes into"
                " initialize"
            )
        trainer.states["lr_scheduler"] = self.lr_scheduler
        if self._metric is not None:
            self._metric.update(self._lr())
            self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})
            trainer.states["metrics"]["train"]["LR"] = self._metric

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self._step()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if not self.by_epoch:
            self._step()

    def _step(self) -> None:
        self._warn_past_the_end()
        self.lr_scheduler.step()
        if self._metric is not None:
            self._metric.update(self._lr())

    def _warn_past_the_end(self) -> None:
        total = getattr(self.lr_scheduler, "total_steps", None) or getattr(self.lr_scheduler, "T_max", None)
        done = getattr(self.lr_scheduler, "last_epoch", 0)
        if isinstance(total, int) and isinstance(done, int) and done >= total:
            get_dist_logger().warning_once(
                f"the learning-rate schedule ({type(self.lr_scheduler).__name__}) was made for {total} steps"
                " and is stepped beyond its end; what it does there is not a schedule. Give it the number"
                f" of {'epochs' if self.by_epoch else 'iterations'} of the whole training",
                ranks=[0],
            )

    def _lr(self) -> float:
        return float(self.lr_scheduler.get_last_lr()[0])


def _drives(lr_scheduler: Any, optimizer: Optimizer) -> bool:
    """Whether the scheduler writes into the groups of ``optimizer``; one that does not tell is believed."""
    own = getattr(lr_scheduler, "optimizer", None)
    if not isinstance(own, Optimizer):
        return True
    return any(group is other for group in own.param_groups for other in optimizer.param_groups)


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, scheduler and epoch every ``interval`` epochs, or iterations.

    ``trainer.resume`` goes on from what this writes, ``colossalai.utils.load_checkpoint`` reads it.

    Args:
        checkpoint_dir: a folder, in which each checkpoint has a file of its own (``epoch_3.pt``,
            ``epoch_3_step_1200.pt``), or the name of one file (``xxx.pt``), which is replaced each time.
        model: the model to save; that of the engine if left out.
        save_by_iter: count iterations instead of epochs.  Iterations whose gradients still wait for the rest
            of their group (gradient accumulation) are not in the weights; a resumed run repeats them.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if interval < 1:
            raise ValueError(f"SaveCheckpointHook needs an interval of at least 1, got {interval!r}")
        if checkpoint_dir is None:
            raise ValueError("SaveCheckpointHook needs checkpoint_dir, the folder or the file to save to")
        self.interval = interval
        self.checkpoint_dir = Path(checkpoint_dir)
        self.model = model
        self.save_by_iter = save_by_iter

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self.save_by_iter and trainer.cur_step % self.interval == 0:
            name = f"epoch_{trainer.cur_epoch}_step_{trainer.cur_step}.pt"
            waiting = _waiting(trainer.engine.optimizer)
            self._save(
                trainer, name, trainer.cur_step - waiting, **{STEP_IN_EPOCH: trainer.step_in_epoch - waiting}
            )

    def after_train_epoch(self, trainer: Trainer) -> None:
        if not self.save_by_iter and (trainer.cur_epoch + 1) % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt", trainer.cur_step)

    def _save(self, trainer: Trainer, name: str, step: int, **where: int) -> None:
        one_file = bool(self.checkpoint_dir.suffix) and not self.checkpoint_dir.is_dir()
        save_checkpoint(
            self.checkpoint_dir if one_file else self.checkpoint_dir / name,
            trainer.cur_epoch,
            self.model or trainer.engine.model,
            trainer.engine.optimizer,
            trainer.states.get("lr_scheduler"),
            step=step,
            **where,
        )


def _waiting(optimizer: Optimizer) -> int:
    """Iterations whose gradients have come together, but not yet changed the weights."""
    return optimizer.progress.done if isinstance(optimizer, GradAccumOptimizer) else 0


@HOOKS.register_module
class RecordPipelineHook(BaseHook):
    """Records some training steps of a pipeline (see ``colossalai.pipeline.record_run``), and logs their
    summary.

    Args:
        path: the file to write: a trace if its name ends in ``.json``, else a picture of the last recorded
            step.
        skip: how many steps of the training come before; the first ones are slower.
        steps: how many to record.
    """

    def __init__(self, path: str | Path, skip: int = 2, steps: int = 3, priority: int = 10) -> None:
        super().__init__(priority)
        if skip < 0 or steps < 1:
            raise ValueError(
                f"RecordPipelineHook skips 0 steps or more and records at least 1, got skip={skip} and"
                f" steps={steps}"
            )
        self.path, self.skip, self.steps = Path(path), skip, steps
        self._seen = 0
        self._block, self._recording = ExitStack(), Recording()

    def before_train_iter(self, trainer: Trainer) -> None:
        if self._seen == self.skip:
            self._recording = self._block.enter_context(record_run())

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._seen += 1
        if self._seen == self.skip + self.steps:
            self._write()

    def after_train(self, trainer: Trainer) -> None:
        if self.skip < self._seen < self.skip + self.steps:  # the training was shorter
            self._write()
        elif self._seen <= self.skip:
            get_dist_logger().warning(
                f"RecordPipelineHook recorded nothing: it skips {self.skip} steps, and there were"
                f" {self._seen}",
                ranks=[0],
            )

    def _write(self) -> None:
        self._block.close()
        get_dist_logger().info(self._recording.summary(), ranks=[0])
        if self.path.suffix == ".json":
            self._recording.trace(self.path)
        else:
            self._recording.picture(self.path)


@HOOKS.register_module
class EarlyStoppingHook(BaseHook):
    """Ends training when a metric has not become better for some epochs.

    All ranks decide alike, since they share the metrics of an epoch. A resumed training begins to count anew.

    Args:
        metric: the name of the metric, as its hook calls it: ``Loss``, ``Accuracy``.
        patience: how many tests (or training epochs) without an improvement end the training.
        min_delta: an improvement is a change by more than this.
        higher_is_better: whether the metric should grow; by default as the metric itself says.
        mode: ``'test'`` watches the metric of tests, ``'train'`` that of training epochs.
    """

    def __init__(
        self,
        metric: str = "Loss",
        patience: int = 3,
        min_delta: float = 0.0,
        higher_is_better: bool | None = None,
        mode: str = "test",
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"EarlyStoppingHook needs patience of at least 1, got {patience!r}")
        if min_delta < 0:
            raise ValueError(f"EarlyStoppingHook needs min_delta of at least 0, got {min_delta!r}")
        if mode not in ("train", "test"):
            raise ValueError(f"EarlyStoppingHook: mode is 'train' or 'test', got {mode!r}")
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.higher_is_better = higher_is_better
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._without, self._looked = 0, False

    def before_train(self, trainer: Trainer) -> None:
        known = trainer.states.get("metrics", {}).get(self.mode, {})
        if self.metric not in known:
            raise ValueError(
                f"EarlyStoppingHook watches {self.metric!r}, which no hook measures; attach LossHook or"
                f" another metric hook (there are: {', '.join(known) or 'none'})"
            )
        self.best = self.best_epoch = None
        self._without, self._looked = 0, False

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.mode == "train":
            self._look(trainer)

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.mode == "test":
            self._look(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if not self._looked:
            get_dist_logger().warning(
                f"EarlyStoppingHook has seen no {self.mode} epoch: give fit a test_dataloader, or watch"
                " mode='train'",
                ranks=[0],
            )

    def _look(self, trainer: Trainer) -> None:
        self._looked = True
        metric = trainer.states["metrics"][self.mode][self.metric]
        value = float(metric.get_accumulated_value())
        if self._is_better(value, metric):
            self.best, self.best_epoch, self._without = value, trainer.cur_epoch, 0
            return
        self._without += 1
        if self._without >= self.patience:
            best = "was never a number" if self.best is None else f"was best in epoch {self.best_epoch}"
            trainer.stop_training(
                f"{self.metric} ({self.mode}) {best}, and has not become better for {self._without} epochs"
            )

    def _is_better(self, value: float, metric: Any) -> bool:
        if value != value or self.best is None:  # nan is never better
            return value == value
        higher = self.higher_is_better
        if higher is None:
            return bool(metric.is_better(value, self.best)) and abs(value - self.best) > self.min_delta
        gain = value - self.best if higher else self.best - value
        return gain > self.min_delta
