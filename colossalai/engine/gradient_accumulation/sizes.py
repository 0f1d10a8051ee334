"""How many batches a data loader has, and of how many samples, as far as it can be known before they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from colossalai.engine.schedule.nest import batch_size


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
