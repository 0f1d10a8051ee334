"""Hooks that show: on the progress bar, in the log, in files and services that draw metrics."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import (
    DistributedLogger,
    JSONLinesWriter,
    MetricWriter,
    TensorboardWriter,
    WandbWriter,
)
from colossalai.logging.metric_writers import import_wandb
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.metrics import format_number
from colossalai.utils import MultiTimer, is_no_pp_or_last_stage, report_memory_usage
from colossalai.utils.parallel import is_first_of_stage

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer


class LogByEpochHook(BaseHook):
    """A hook that logs every ``interval`` epochs, on one rank."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        if not callable(getattr(logger, "info", None)):
            raise TypeError(
                f"{type(self).__name__} needs a logger, such as colossalai.logging.get_dist_logger(), got"
                f" {logger!r}"
            )
        if interval < 1:
            raise ValueError(f"{type(self).__name__} needs an interval of at least 1 epoch, got {interval!r}")
        self.logger = logger
        self._interval = interval
        self._is_rank_to_log = _writes_here()

    def _is_epoch_to_log(self, trainer: Trainer) -> bool:
        return self._is_rank_to_log and (trainer.cur_epoch + 1) % self._interval == 0


@HOOKS.register_module
class LogMetricByStepHook(BaseHook):
    """Puts the metrics of each iteration on the progress bar (``trainer.states['step_metrics']``)."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._show(trainer, "train")

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._show(trainer, "test")

    def _show(self, trainer: Trainer, mode: str) -> None:
        metrics = trainer.states.get("metrics", {}).get(mode, {})
        trainer.states["step_metrics"] = {
            name.lower(): metric.describe_last_step() for name, metric in metrics.items()
        }


@HOOKS.register_module
class LogMetricByEpochHook(LogByEpochHook):
    """Logs all metrics at the end of an epoch: ``[Epoch 0 / Train]: Loss = 2.3 | LR = 0.1``."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, mode: str) -> None:
        metrics = trainer.states.get("metrics", {}).get(mode, {})
        if metrics and self._is_epoch_to_log(trainer):
            text = " | ".join(f"{name} = {metric.describe_accumulated()}" for name, metric in metrics.items())
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {mode.capitalize()}]: {text}")


class WriteMetricsHook(BaseHook):
    """Gives a ``MetricWriter`` the metrics: those of each iteration, and those of epochs when they end.

    Args:
        writer: the writer of this rank, or None on a rank that writes nothing.
    """

    def __init__(self, writer: MetricWriter | None, priority: int = 10) -> None:
        super().__init__(priority)
        if writer is not None and not callable(getattr(writer, "log", None)):
            raise TypeError(
                f"{type(self).__name__} needs a writer with a method log(values, step), such as"
                f" colossalai.logging.JSONLinesWriter(file), got {writer!r}"
            )
        self.metric_writer = writer

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, "train", by_epoch=False)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, "test", by_epoch=False)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "train", by_epoch=True)

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "test", by_epoch=True)

    def after_train(self, trainer: Trainer) -> None:
        if callable(flush := getattr(self.metric_writer, "flush", None)):
            flush()

    def _write(self, trainer: Trainer, mode: str, *, by_epoch: bool) -> None:
        if self.metric_writer is None:
            return
        values: dict[str, float] = {}
        for name, metric in trainer.states.get("metrics", {}).get(mode, {}).items():
            if metric.epoch_only == by_epoch:
                values[name] = metric.get_accumulated_value() if by_epoch else metric.get_last_step_value()
                values |= metric.further_values(by_epoch)
        if values:
            named = {f"{name}/{mode}": value for name, value in values.items()}
            self.metric_writer.log(named, trainer.cur_step)


@HOOKS.register_module
class TensorboardHook(WriteMetricsHook):
    """Writes the metrics for TensorBoard.

    Args:
        log_dir: where; each writing rank has a folder of its own in it.
        ranks: the ranks of ``parallel_mode`` that write; all if left out.
    """

    def __init__(
        self,
        log_dir: str | Path,
        ranks: Collection[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        rank = gpc.get_local_rank(parallel_mode) if gpc.is_initialized(parallel_mode) else 0
        writes = is_no_pp_or_last_stage() and (ranks is None or rank in ranks)
        folder = Path(log_dir) / f"{parallel_mode.value}_rank_{rank}"
        writer = TensorboardWriter(folder) if writes else None
        super().__init__(writer, priority)
        self.writer = None if writer is None else writer.summary


@HOOKS.register_module
class JSONLinesHook(WriteMetricsHook):
    """Appends the metrics to ``file``, a JSON object a line, on the first rank that has losses."""

    def __init__(self, file: str | Path, priority: int = 10) -> None:
        super().__init__(JSONLinesWriter(file) if _writes_here() else None, priority)


@HOOKS.register_module
class WandbHook(WriteMetricsHook):
    """Sends the metrics to Weights & Biases, from the first rank that has losses; ``options`` are those of
    ``wandb.init``.
    """

    def __init__(self, priority: int = 10, **options: Any) -> None:
        import_wandb()  # on every rank: without it, those that do not write would wait for the one that does
        super().__init__(WandbWriter(**options) if _writes_here() else None, priority)


def _writes_here() -> bool:
    return is_first_of_stage() and is_no_pp_or_last_stage()


@HOOKS.register_module
class LogTimingByEpochHook(LogByEpochHook):
    """Logs how long epochs and iterations took.

    Args:
        timer: the timer of the trainer.
        log_eval: also after tests.
        ignore_num_train_steps: first iterations of the training that do not enter the mean (warm-up).
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._timer = timer
        self._log_eval = log_eval
        self._ignored = ignore_num_train_steps
        self._steps: dict[str, list[float]] = {"Train-step": [], "Test-step": []}

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if trainer.timer is not self._timer:
            raise ValueError(
                "LogTimingByEpochHook needs the timer of the trainer; pass one timer to both: Trainer(engine,"
                " timer=timer)"
            )
        self._timer.set_status(True)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self._ignored > 0:
            self._ignored -= 1
        else:
            self._keep("Train-step")

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._keep("Test-step")

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self._is_epoch_to_log(trainer):
            self.logger.info(
                f"[Epoch {trainer.cur_epoch} / Train]: {self._message('Train')} | #steps/epoch ="
                f" {trainer.steps_per_epoch}"
            )

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self._log_eval and self._is_epoch_to_log(trainer):
            self.logger.info(f"[Epoch {trainer.cur_epoch} / Test]: {self._message('Test')}")

    def _keep(self, name: str) -> None:
        self._steps[name].append(self._timer.get_timer(name).get_elapsed_time())

    def _message(self, mode: str) -> str:
        epoch, step = f"{mode}-epoch", f"{mode}-step"
        parts = [f"{epoch}: last = {self._last(epoch)} s"]
        if step in dict(self._timer):  # no iteration is left in an epoch that is resumed at its end
            parts.append(f"{step}: last = {self._last(step)} s")
        if steps := self._steps[step]:
            parts[1] += f", mean = {format_number(sum(steps) / len(steps))} s"
        return " | ".join(parts)

    def _last(self, name: str) -> str:
        return format_number(self._timer.get_timer(name).get_elapsed_time())


@HOOKS.register_module
class LogMemoryByEpochHook(LogByEpochHook):
    """Logs the memory in use and its peak since the last report, before training and after each epoch.

    Args:
        log_eval: also after tests.
        report_cpu: also the memory of the host.
    """

    def __init__(
        self,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._log_eval = log_eval
        self._report_cpu = report_cpu

    def before_train(self, trainer: Trainer) -> None:
        if self._is_rank_to_log:
            report_memory_usage("Before-train", self.logger, self._report_cpu)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self._is_epoch_to_log(trainer):
            report_memory_usage(f"[Epoch {trainer.cur_epoch} / Train]", self.logger, self._report_cpu)

    def after_test(self, trainer: Trainer) -> None:
        if self._log_eval and self._is_epoch_to_log(trainer):
            report_memory_usage(f"[Epoch {trainer.cur_epoch} / Test]", self.logger, self._report_cpu)
