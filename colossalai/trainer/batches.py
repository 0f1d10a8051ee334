"""An iterator that knows whether there is more, and a progress bar over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_NOTHING = object()


class Batches(Iterator[Any]):
    """The batches of one pass.  ``more`` looks at the next batch, which ``next`` then returns.

    So a ``StopIteration`` from inside the model is never taken for the end of the data.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self._batches = iter(dataloader)
        self._next: Any = _NOTHING

    def more(self) -> bool:
        if self._next is _NOTHING:
            self._next = next(self._batches, _NOTHING)
        return self._next is not _NOTHING

    def skip(self, count: int) -> None:
        """Pass over the first ``count`` batches, which an earlier run has seen."""
        for done in range(count):
            if next(self, _NOTHING) is _NOTHING:
                raise ValueError(
                    f"the checkpoint was written after {count} batches of the epoch, but train_dataloader has"
                    f" only {done}; resume with the data, batch size and number of ranks that it was written"
                    " with"
                )

    def __next__(self) -> Any:
        if not self.more():
            raise StopIteration
        batch, self._next = self._next, _NOTHING
        return batch


def length(dataloader: Any) -> int | None:
    """Batches in one pass, where that is known."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Let the sampler choose the order of ``epoch``, so that a resumed run sees the data in the same
    order.
    """
    for sampler in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        if callable(setter := getattr(sampler, "set_epoch", None)):
            setter(epoch)
