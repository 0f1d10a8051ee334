"""Gradient accumulation: several iterations make one step, equal to one step with their batches joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.engine.gradient_accumulation.parts import (
    GradAccumDataloader,
    GradAccumGradientHandler,
    GradAccumLrSchedulerByStep,
    GradAccumOptimizer,
)
from colossalai.engine.gradient_accumulation.progress import Accumulation
from colossalai.engine.gradient_handler import BaseGradientHandler


def accumulate_gradient(
    model: nn.Module,
    optimizer: Optimizer,
    dataloader: Iterable[Any] | None,
    accumulate_size: int,
    gradient_handlers: Sequence[BaseGradientHandler] | None = None,
    lr_scheduler: LRScheduler | None = None,
) -> tuple[
    GradAccumOptimizer,
    GradAccumDataloader | None,
    list[GradAccumGradientHandler],
    GradAccumLrSchedulerByStep | None,
]:
    """The optimizer, data loader, handlers and scheduler of a run that steps every ``accumulate_size``
    iterations.

    The training loop does not change: it calls all of them in every iteration.
    """
    progress = Accumulation(accumulate_size)
    return (
        GradAccumOptimizer(optimizer, accumulate_size, model, progress=progress),
        None if dataloader is None else GradAccumDataloader(dataloader, accumulate_size, progress=progress),
        [GradAccumGradientHandler(h, accumulate_size, progress=progress) for h in gradient_handlers or ()],
        None
        if lr_scheduler is None
        else GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size, progress=progress),
    )


__all__ = [
    "Accumulation",
    "GradAccumDataloader",
    "GradAccumGradientHandler",
    "GradAccumLrSchedulerByStep",
    "GradAccumOptimizer",
    "accumulate_gradient",
]
