"""What else takes part in accumulation: the data loader, the learning-rate scheduler and the gradient handlers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import IterableDataset

from colossalai.engine.gradient_accumulation.progress import Accumulation
from colossalai.engine.gradient_handler import BaseGradientHandler


class GradAccumDataloader:
    """A data loader that says how many batches are left, so that the last group of an epoch may be a shorter one.

    Where the loader has no (reliable) length, it is read one group ahead.
    """

    def __init__(
        self, dataloader: Iterable[Any], accumulate_size: int, *, progress: Accumulation | None = None
    ) -> None:
        self.dataloader = dataloader
        self.progress = progress or Accumulation(accumulate_size)

    def __len__(self) -> int:
        return len(self.dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if dropped := self.progress.restart():
            warnings.warn(
                f"a new pass over the data begins while gradients of {dropped} iterations wait for the rest of their"
                " group; they are dropped. Let each pass run to its end",
                stacklevel=2,
            )
        return self._counted(self.dataloader) if _has_length(self.dataloader) else self._read_ahead()

    def _counted(self, dataloader: Any) -> Iterator[Any]:
        length = len(dataloader)
        for index, batch in enumerate(dataloader):
            self.progress.announce(length - index)
            yield batch
        self.progress.announce(None)

    def _read_ahead(self) -> Iterator[Any]:
        batches = iter(self.dataloader)
        while group := list(islice(batches, self.progress.accumulate_size)):
            whole = len(group) == self.progress.accumulate_size
            for index, batch in enumerate(group):
                self.progress.announce(None if whole else len(group) - index)
                yield batch
        self.progress.announce(None)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # before __init__ (copy, pickle)
            raise AttributeError(name)
        return getattr(self.dataloader, name)


class GradAccumLrSchedulerByStep:
    """A scheduler whose ``step``, called in every iteration, counts steps of the optimizer.

    Called once per epoch it works as well: at the end of an epoch no group is open.
    """

    def __init__(
        self, lr_scheduler: LRScheduler, accumulate_size: int, *, progress: Accumulation | None = None
    ) -> None:
        self.lr_scheduler = lr_scheduler
        self._alone = progress is None
        self.progress = progress or Accumulation(accumulate_size)

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Sized, accumulate_size: int) -> int:
        """Steps of the optimizer in one pass over ``dataloader``; the last group may be shorter than the others."""
        return -(-len(dataloader) // accumulate_size)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizer has."""
        if self.progress.advance() if self._alone else self.progress.done == 0:
            self.lr_scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "lr_scheduler":  # before __init__ (copy, pickle)
            raise AttributeError(name)
        return getattr(self.lr_scheduler, name)


class GradAccumGradientHandler:
    """A gradient handler that works in the last iteration of each group."""

    def __init__(
        self,
        grad_handler: BaseGradientHandler,
        accumulate_size: int,
        *,
        progress: Accumulation | None = None,
    ) -> None:
        if not isinstance(grad_handler, BaseGradientHandler):
            raise TypeError(
                f"GradAccumGradientHandler wraps a BaseGradientHandler, got {type(grad_handler).__name__}"
            )
        self.grad_handler = grad_handler
        self._alone = progress is None
        self.progress = progress or Accumulation(accumulate_size)

    def handle_gradient(self) -> None:
        """Handle the gradients, if they are complete."""
        if self.progress.advance() if self._alone else self.progress.is_last:
            self.grad_handler.handle_gradient()


def _has_length(dataloader: Any) -> bool:
    # the length of an iterable dataset is what its author believes
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        return False
    try:
        len(dataloader)
    except TypeError:
        return False
    return True
