"""The hook that steps the learning-rate scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from colossalai.logging import get_dist_logger
from colossalai.registry import HOOKS
from colossalai.trainer.hooks.base import BaseHook
from colossalai.trainer.hooks.metrics import LearningRateMetric

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
                f"LRSchedulerHook needs a learning-rate scheduler, got {lr_scheduler!r}; did you pass it to initialize?"
            )
        if not isinstance(by_epoch, bool):
            raise TypeError(
                "LRSchedulerHook needs by_epoch as True (a step after each epoch) or False (after each iteration), got"
                f" {by_epoch!r}"
            )
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self._metric = LearningRateMetric(epoch_only=by_epoch) if store_lr_in_state else None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not _drives(self.lr_scheduler, trainer.engine.optimizer):
            raise ValueError(
                f"LRSchedulerHook got a {type(self.lr_scheduler).__name__} of another optimizer than the engine's; its"
                " learning rates would reach nothing. Build it on the optimizer that goes into initialize"
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
                f"the learning-rate schedule ({type(self.lr_scheduler).__name__}) was made for {total} steps and is"
                " stepped beyond its end; what it does there is not a schedule. Give it the number of"
                f" {'epochs' if self.by_epoch else 'iterations'} of the whole training",
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
