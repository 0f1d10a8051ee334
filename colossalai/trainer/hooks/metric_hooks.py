"""Hooks that measure: they fill ``trainer.states['metrics']``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colossalai.interface.nest import tensors
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.metrics import AccuracyMetric, LossMetric, Metric, ThroughputMetric
from colossalai.utils.throughput import OperationCounter

if TYPE_CHECKING:
    from colossalai.trainer.trainer import Trainer

MODES = ("train", "test")


class MetricHook(BaseHook):
    """A hook with one metric for training and one for testing, reset at the start of each epoch.

    Every rank has the metrics.  In a pipeline those of losses and outputs are updated where the last layers
    are (``_is_stage_to_compute``); at the end of an epoch all ranks know them.
    """

    name: str

    def __init__(self, priority: int) -> None:
        super().__init__(priority)
        self._is_stage_to_compute = True  # in a pipeline, where the loss is: known once there is a trainer
        self.metrics: dict[str, Metric] = {}

    def make_metric(self, mode: str) -> Metric:
        """A new metric for ``'train'`` or ``'test'``."""
        raise TypeError(f"{type(self).__name__} must implement make_metric(mode) and set the attribute name")

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self._is_stage_to_compute = trainer.engine.schedule.has_loss
        self.init_runner_states(trainer, "metrics", {mode: {} for mode in MODES})
        for mode in MODES:
            if self.name in trainer.states["metrics"][mode]:
                raise ValueError(f"two hooks measure {self.name!r}; attach {type(self).__name__} once")
            self.metrics[mode] = trainer.states["metrics"][mode][self.name] = self.make_metric(mode)

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._reset("train")

    def before_test(self, trainer: Trainer) -> None:
        self._reset("test")

    def _reset(self, mode: str) -> None:
        self.metrics[mode].reset()


@HOOKS.register_module
class LossHook(MetricHook):
    """Measures ``Loss``."""

    name = "Loss"

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def make_metric(self, mode: str) -> Metric:
        return LossMetric(epoch_only=mode == "test")

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self._is_stage_to_compute:
            self.metrics["train"].update(loss)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if self._is_stage_to_compute:
            self.metrics["test"].update(loss)


@HOOKS.register_module
class AccuracyHook(MetricHook):
    """Measures ``Accuracy``: correct predictions per label.

    Args:
        accuracy_func: the number of correct predictions, such as ``colossalai.nn.metric.Accuracy()``.
    """

    name = "Accuracy"

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        if not callable(accuracy_func):
            raise TypeError(f"accuracy_func is a function of outputs and labels, got {accuracy_func!r}")
        self.accuracy_func = accuracy_func

    def make_metric(self, mode: str) -> Metric:
        return AccuracyMetric(epoch_only=mode == "test", accuracy_func=self.accuracy_func)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._update("train", output, label)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._update("test", output, label)

    def _update(self, mode: str, output: Any, label: Any) -> None:
        if not self._is_stage_to_compute:
            return
        if output is None:
            raise ValueError(
                "AccuracyHook needs outputs and labels; call fit or evaluate with return_output_label=True"
            )
        labels = next(tensors(label), None)
        if labels is None:
            raise ValueError(
                f"AccuracyHook needs labels, got {type(label).__name__}; does the data have any?"
            )
        self.metrics[mode].update(output, label, labels.numel())


@HOOKS.register_module
class ThroughputHook(MetricHook):
    """Measures ``Throughput``: samples and, of texts, tokens per second; operations per second, and their
    share of what the device could do (MFU), where its peak is known.

    The operations of this rank are counted in the first iteration of training and of testing, which takes
    longer (``OperationCounter``); those of others are taken to grow with the samples.

    Args:
        ignored_steps: iterations at the start of each epoch that do not count (warm-up).
        tflop_per_step: the work of one iteration of one rank, in units of 10**12 operations; if given, it is
            not counted.
        use_local: count this rank only, not all data-parallel ranks.
    """

    name = "Throughput"

    def __init__(
        self,
        ignored_steps: int = 0,
        priority: int = 10,
        tflop_per_step: float = 0,
        use_local: bool = False,
    ) -> None:
        super().__init__(priority)
        self.options: dict[str, Any] = {
            "ignored_steps": ignored_steps,
            "tflop_per_step": tflop_per_step,
            "use_local": use_local,
        }
        self._counter: OperationCounter | None = None
        self._tflop_per_sample: dict[str, float] = {}

    def make_metric(self, mode: str) -> Metric:
        return ThroughputMetric(epoch_only=mode == "test", **self.options)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        super().after_hook_is_attached(trainer)
        trainer.timer.set_status(True)
        self._counter, self._tflop_per_sample = None, {}

    def before_train_iter(self, trainer: Trainer) -> None:
        self._count(trainer, "train")

    def before_test_iter(self, trainer: Trainer) -> None:
        self._count(trainer, "test")

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._update(trainer, "train", "Train-step")

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._update(trainer, "test", "Test-step")

    def _count(self, trainer: Trainer, mode: str) -> None:
        if not self.options["tflop_per_step"] and mode not in self._tflop_per_sample:
            self._counter = trainer.during_step.enter_context(OperationCounter())

    def _update(self, trainer: Trainer, mode: str, timer: str) -> None:
        schedule = trainer.engine.schedule
        if self._counter is not None:
            self._tflop_per_sample[mode] = self._counter.operations / 1e12 / max(schedule.batch_size, 1)
            self._counter = None
        seconds = trainer.timer.get_timer(timer).get_elapsed_time()
        tflop = self._tflop_per_sample.get(mode, 0.0) * schedule.batch_size
        self.metrics[mode].update(schedule.batch_size, seconds, schedule.tokens, tflop)
