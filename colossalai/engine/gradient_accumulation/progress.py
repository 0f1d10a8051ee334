"""Where an accumulating training run stands: how many iterations of the current group are done.

The parts that wait for the end of a group (optimizer, gradient handlers, learning-rate scheduler) share one
``Accumulation``.  The data loader tells it how many batches are left, so that the last group of an epoch may be
shorter and is known to be so from its first iteration on.
"""

from __future__ import annotations


class Accumulation:
    """The current group of iterations, whose gradients become one step of the optimizer."""

    def __init__(self, accumulate_size: int) -> None:
        if isinstance(accumulate_size, bool) or not isinstance(accumulate_size, int) or accumulate_size < 1:
            raise ValueError(
                f"accumulate_size is the number of iterations per optimizer step, at least 1; got {accumulate_size!r}"
            )
        self.accumulate_size = accumulate_size
        self.done = 0
        self._group_size = accumulate_size
        self._batches_left: int | None = None

    @property
    def group_size(self) -> int:
        """Iterations in the current group; settled when its first one begins."""
        if self.done == 0:
            left = self._batches_left
            self._group_size = self.accumulate_size if not left else min(self.accumulate_size, left)
        return self._group_size

    @property
    def is_last(self) -> bool:
        """Whether the current iteration is the last one of its group."""
        return self.done + 1 >= self.group_size

    def announce(self, batches_left: int | None) -> None:
        """The data loader's word: so many batches are left in this epoch, the current one included."""
        self._batches_left = batches_left

    def advance(self) -> bool:
        """End an iteration; whether it was the last one of its group."""
        complete = self.is_last
        self.done = 0 if complete else self.done + 1
        return complete

    def restart(self) -> int:
        """Forget an unfinished group; returns how many iterations it had."""
        dropped, self.done = self.done, 0
        return dropped
