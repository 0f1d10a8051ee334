"""Where an accumulating training run stands: how many iterations of the current group are done.

The parts that wait for the end of a group (optimizer, gradient handlers, learning-rate scheduler) share one
``Accumulation``.  The data loader tells it how many batches are left, so that the last group of an epoch may
be shorter and is known to be so from its first iteration on, and how many samples they have, so that every
sample of a group counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from colossalai.logging import get_dist_logger


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
