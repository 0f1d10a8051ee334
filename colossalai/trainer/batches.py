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
    """Let the sampler choose the order of ``epoch``, so that a resumed run sees the data in the same order."""
    for sampler in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        if callable(setter := getattr(sampler, "set_epoch", None)):
            setter(epoch)
