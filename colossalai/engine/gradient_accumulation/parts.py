"""What else takes part in accumulation: the data loader, the learning-rate scheduler and the gradient
handlers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, IterableDataset

from colossalai._numeric import ceil_div
from colossalai.engine.gradient_accumulation.progress import Accumulation
from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.interface import OptimizerWrapper
from colossalai.interface.nest import batch_size
from colossalai.logging import get_dist_logger

# How many batches a data loader has, and of how many samples, as far as it can be known before they are
# read.


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


def batch_sizes(dataloader: Any) -> Callable[[int], int] | None:
    """The samples in a batch by its number; None where only reading them would tell."""
    if isinstance(dataloader, (list, tuple)):
        sizes = [batch_size(batch) for batch in dataloader]
        return sizes.__getitem__ if all(sizes) else None
    sampler = getattr(dataloader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:  # a subclass may cut in its own way
        return None
    try:
        samples = len(sampler.sampler)  # type: ignore[arg-type]
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
