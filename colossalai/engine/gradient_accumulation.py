"""Gradient accumulation: several iterations make one step, equal to one step with their batches joined.

The optimizer, the data loader, the learning-rate scheduler and the gradient handlers of a run take part in
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, IterableDataset

from colossalai._numeric import ceil_div
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.interface import OptimizerWrapper
from colossalai.interface.nest import batch_size
from colossalai.logging import get_dist_logger

# Where an accumulating training run stands: how many iterations of the current group are done.
#
# The parts that wait for the end of a group (optimizer, gradient handlers, learning-rate scheduler) share
# one ``Accumulation``. The data loader tells it how many batches are left, so that the last group of an
# epoch may be shorter and is known to be so from its first iteration on, and how many samples they have, so
# that every sample of a group counts the same.


class Accumulation:
    """The current group of iterations, whose gradients become one step of the optimizer."""

    def __init__(self, accumulate_size: int) -> None:
        if isinstance(accumulate_size, bool) or not isinstance(accumulate_size, int) or accumulate_size < 1:
            raise ValueError(
                "accumulate_size is the number of iterations per optimizer step, at least 1; got"
                f" {accumulate_size!r}"
            )
        self.accumulate_size = accumulate_size
        self.done = 0
        self.has_loader = False
        self._group_size = accumulate_size
        self._group_samples = 0
        self._batches_left: int | None = None
        self._sizes: Sequence[int] = ()
        self._heard = self._warned = False

    @property
    def group_size(self) -> int:
        """Iterations in the current group; settled when its first one begins."""
        if self.done == 0:
            left = self._batches_left
            self._group_size = self.accumulate_size if not left else min(self.accumulate_size, left)
            sizes = self._sizes[: self._group_size]
            same = len(sizes) < self._group_size or len(set(sizes)) == 1
            self._group_samples = 0 if same else sum(sizes)
        return self._group_size

    @property
    def is_last(self) -> bool:
        """Whether the current iteration is the last one of its group."""
        return self.done + 1 >= self.group_size

    def share(self, loss: Tensor) -> Tensor:
        """The part of ``loss``, a mean over the samples of its batch, in the mean over the samples of the
        group.
        """
        group_size = self.group_size
        if self._group_samples and self._sizes:
            return loss * (self._sizes[0] / self._group_samples)
        return loss / group_size

    def announce(self, batches_left: int | None, sizes: Sequence[int] = ()) -> None:
        """The data loader's word: so many batches are left in this epoch, the current one included.

        ``sizes`` are the samples in the current batch and in those that follow, as far as they may be in its
        group; nothing where they are not known.
        """
        self._batches_left, self._sizes, self._heard = batches_left, sizes, True

    def advance(self) -> bool:
        """End an iteration; whether it was the last one of its group."""
        complete = self.is_last
        self.done = 0 if complete else self.done + 1
        if complete:
            self._warn_of_another_loader()
            self._heard = False
        return complete

    def _warn_of_another_loader(self) -> None:
        if self.has_loader and not self._heard and not self._warned:
            self._warned = True
            get_dist_logger().warning(
                f"gradients of {self._group_size} iterations were accumulated, but none of their batches"
                " came from the data loader that initialize (or accumulate_gradient) returned; so the end"
                " of a pass is not seen, and its last group goes on in the next pass. Loop over the"
                " returned train_dataloader",
                ranks=[0],
            )

    def restart(self) -> int:
        """Forget an unfinished group; returns how many iterations it had."""
        dropped, self.done = self.done, 0
        return dropped


# How many batches a data loader has, and of how many samples, as far as it can be known before they are
# read.


# What else takes part in accumulation: the data loader, the learning-rate scheduler and the gradient
# handlers.


def has_length(dataloader: Any) -> bool:
    """Whether the number of batches can be relied on."""
    # the length of an iterable dataset is what its author believes
    if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
        return False
    try:
        len(dataloader)
    except TypeError:
        return False
    return True


def _batches_left(dataloader: Any, behind: int) -> int:
    """The batches of a pass without its first ``behind`` samples."""
    return len(dataloader) - behind // dataloader.batch_size if behind else len(dataloader)


def batch_sizes(dataloader: Any, behind: int = 0) -> Callable[[int], int] | None:
    """The samples in a batch by its number, in a pass without its first ``behind`` samples.

    None where only reading them would tell.
    """
    if isinstance(dataloader, (list, tuple)):
        sizes = [batch_size(batch) for batch in dataloader]
        return sizes.__getitem__ if all(sizes) else None
    sampler = getattr(dataloader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:  # a subclass may cut in its own way
        return None
    try:
        samples = len(sampler.sampler) - behind  # type: ignore[arg-type]
    except TypeError:
        return None
    return lambda index: min(sampler.batch_size, samples - index * sampler.batch_size)


class GradAccumDataloader:
    """A data loader that says how many batches are left, so that the last group of an epoch may be a shorter
    one.

    It also says how many samples the batches of a group have.  Where the loader has no (reliable) length, it
    is read one group ahead; where it has one but its batches' sizes cannot be known before, they count as
    equal, and a difference is reported once.
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
                f"a new pass over the data begins while gradients of {dropped} iterations wait for the rest"
                " of their group; they are dropped. Let each pass run to its end",
                stacklevel=2,
            )
        return self._counted(self.dataloader) if has_length(self.dataloader) else self._read_ahead()

    def _counted(self, dataloader: Any) -> Iterator[Any]:
        batches = iter(dataloader)
        behind = getattr(dataloader, "samples_behind", 0)  # of a pass that a checkpoint resumes
        length, size_of, first = _batches_left(dataloader, behind), batch_sizes(dataloader, behind), 0
        for index, batch in enumerate(batches):
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
                f"gradient accumulation met a batch of {size} samples after batches of {first}; the sizes of"
                f" this {type(self.dataloader).__name__}'s batches cannot be known in advance, so each batch"
                " counts the same, and samples of a smaller one count more. Let it give batches of one size"
                " (drop_last=True)",
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
        """Steps of the optimizer in one pass over ``dataloader``; the last group may be shorter than the
        others.
        """
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


# ---- The optimizer of an accumulating run: it divides losses, and steps at the end of each group of
# iterations ----


class GradAccumOptimizer(OptimizerWrapper):
    """Call it in every iteration as usual; the parameters move in the last iteration of each group only.

    Every loss, a mean over its batch, is weighted by its part of the group's samples, so a group equals one
    batch that joins its batches.  Without a ``GradAccumDataloader`` that knows the batches' sizes, each batch
    counts the same.

    Args:
        optim: the optimizer, boosted or not.
        accumulate_size: iterations per step.
        model: the model that is called; if it synchronizes gradients (``no_sync``), it does so once per
            group.
        progress: shared with the other parts of the run; its own if left out.
    """

    optim: OptimizerWrapper

    def __init__(
        self,
        optim: Optimizer,
        accumulate_size: int,
        model: nn.Module | None = None,
        *,
        progress: Accumulation | None = None,
    ) -> None:
        super().__init__(optim if isinstance(optim, OptimizerWrapper) else OptimizerWrapper(optim))
        self.progress = progress or Accumulation(accumulate_size)
        self._no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
        if model is not None and hasattr(model, "no_sync"):
            _NoSync(model, self.progress)
            self._no_sync = cast(Any, model).no_sync  # Gemini decides in the backward pass

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self.progress.is_last else self._no_sync():
            self.optim.backward(self.progress.share(loss), *args, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.optim.scale_loss(self.progress.share(loss))

    def unscale_grad(self) -> None:
        if self.progress.is_last:
            self.optim.unscale_grad()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clip, in the last iteration of a group; before that the gradients are not complete and nothing
        happens.
        """
        if self.progress.is_last:
            self.optim.clip_grad_by_value(clip_value)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip, in the last iteration of a group; before that nothing happens and the norm is given as 0."""
        if self.progress.is_last:
            return self.optim.clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)
        return torch.zeros(())

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """End an iteration; step if it was the last one of its group."""
        return self.optim.step(*args, **kwargs) if self.progress.advance() else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, unless they hold a part of a group."""
        if self.progress.done == 0:
            self.optim.zero_grad(*args, **kwargs)


class _NoSync:
    """Runs a model's forward passes under its ``no_sync`` in all but the last iteration of a group.

    The forward pass is where torch's DDP decides whether the backward pass will synchronize.
    """

    def __init__(self, model: nn.Module, progress: Accumulation) -> None:
        self.progress = progress
        self.open: list[AbstractContextManager[Any] | None] = []
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: Any, args: Any) -> None:
        context: AbstractContextManager[Any] | None = None
        if torch.is_grad_enabled() and not self.progress.is_last:
            context = model.no_sync()
            context.__enter__()
        self.open.append(context)

    def leave(self, model: Any, args: Any, output: Any) -> None:
        context = self.open.pop() if self.open else None
        if context is not None:
            context.__exit__(None, None, None)


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
