"""What else takes part in accumulation: the data loader, the learning-rate scheduler and the gradient handlers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from colossalai._numeric import ceil_div
from colossalai.engine.gradient_accumulation.progress import Accumulation
from colossalai.engine.gradient_accumulation.sizes import batch_sizes, has_length
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.interface.nest import batch_size
from colossalai.logging import get_dist_logger


class GradAccumDataloader:
    """A data loader that says how many batches are left, so that the last group of an epoch may be a shorter one.

    It also says how many samples the batches of a group have.  Where the loader has no (reliable) length, it is read one
    group ahead; where it has one but its batches' sizes cannot be known before, they count as equal, and a difference is
    reported once.
    """

    def __init__(
        self, dataloader: Iterable[Any], accumulate_size: int, *, progress: Accumulation | None = None
    ) -> None:
        self.dataloader = dataloader
        self.progress = progress or Accumulation(accumulate_size)
        self.progress.has_loader = True
        self._differed = False

    def __len__(self) -> int:
        return len(self.dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if dropped := self.progress.restart():
            warnings.warn(
                f"a new pass over the data begins while gradients of {dropped} iterations wait for the rest of their"
                " group; they are dropped. Let each pass run to its end",
                stacklevel=2,
            )
        return self._counted(self.dataloader) if has_length(self.dataloader) else self._read_ahead()

    def _counted(self, dataloader: Any) -> Iterator[Any]:
        length, size_of, first = len(dataloader), batch_sizes(dataloader), 0
        for index, batch in enumerate(dataloader):
            following = range(index, min(index + self.progress.accumulate_size, length))
            self.progress.announce(length - index, [size_of(i) for i in following] if size_of else ())
            if size_of is None:
                first = first or batch_size(batch)
                self._report_if_different(first, batch_size(batch))
            yield batch
        self.progress.announce(None)

    def _read_ahead(self) -> Iterator[Any]:
        batches = iter(self.dataloader)
        while group := list(islice(batches, self.progress.accumulate_size)):
            whole = len(group) == self.progress.accumulate_size
            sizes = [batch_size(batch) for batch in group]
            for index, batch in enumerate(group):
                self.progress.announce(
                    None if whole else len(group) - index, sizes[index:] if all(sizes) else ()
                )
                yield batch
        self.progress.announce(None)

    def _report_if_different(self, first: int, size: int) -> None:
        if size != first and not self._differed:
            self._differed = True
            get_dist_logger().warning(
                f"gradient accumulation met a batch of {size} samples after batches of {first}; the sizes of this"
                f" {type(self.dataloader).__name__}'s batches cannot be known in advance, so each batch counts the same,"
                " and samples of a smaller one count more. Let it give batches of one size (drop_last=True)",
                ranks=[0],
            )

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
        return ceil_div(len(dataloader), accumulate_size)

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
