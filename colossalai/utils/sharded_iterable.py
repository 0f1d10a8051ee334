"""An ``IterableDataset`` of which each data-parallel rank sees its own samples.

A stream has no length and no order to choose from, so every rank reads all of it and keeps every n-th sample:
of each *round* of as many samples as there are ranks, its own.  So nothing is communicated, and all ranks
come to the end after equally many samples.  With several workers each of them reads the whole stream and
keeps whole batches, so that the samples and their order do not depend on the number of workers.

The stream must be the same wherever it is read.  So a dataset that shuffles by the random numbers of python,
numpy or torch draws them, everywhere, from one seed for each pass, and not from those of its rank or worker.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from colossalai._numeric import ceil_div


class ShardedIterable(IterableDataset):
    """The samples of one data-parallel rank from a stream that is the same on every rank.

    At the end of the stream, a round that is not complete is filled up with the first samples of the stream,
    or, with ``drop_last``, left out.

    Args:
        place: (rank, ranks).
        batch_size: samples that stay together on one worker; None where each sample is a batch.
        seed: of the random numbers that the dataset draws; each pass has others.
    """

    def __init__(
        self,
        dataset: IterableDataset,
        place: tuple[int, int],
        batch_size: int | None,
        *,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.dataset, self.drop_last, self.seed = dataset, drop_last, seed
        self.rank, self.num_replicas = place
        self.batch_size = batch_size or 1
        self.epoch, self.start = 0, 0  # of the next pass, and the samples, over all ranks, that it leaves out

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be pass number ``epoch``, also for the dataset, if that has such a method."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0
        setter = getattr(self.dataset, "set_epoch", None)
        if setter is not None:
            setter(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        own = self._own(_Reader(self.dataset, self.seed + self.epoch), self.start)
        self.began()
        return (s for i, s in enumerate(own) if i // self.batch_size % workers == worker)

    def began(self) -> None:
        """A pass has begun: the next one is another, and begins at the first sample."""
        self.epoch, self.start = self.epoch + 1, 0

    def _own(self, samples: Iterator[Any], start: int) -> Iterator[Any]:
        seen, first, current = 0, list[Any](), list[Any]()
        for sample in samples:
            if len(first) < self.num_replicas - 1:
                first.append(sample)
            seen += 1
            if seen <= start:
                continue
            current.append(sample)
            if len(current) == self.num_replicas:
                yield current[self.rank]
                current = []
        if seen == 0 or (self.drop_last and seen < self.num_replicas):
            raise ValueError(
                f"{type(self.dataset).__name__} ended after {seen} samples, which leaves none for each of"
                f" {self.num_replicas} data-parallel ranks; an IterableDataset must begin anew in each"
                " __iter__"
            )
        if current and not self.drop_last:
            yield next(islice(chain(current, cycle(first)), self.rank, None))


class SizedShardedIterable(ShardedIterable):
    """The same of a stream that knows its length."""

    def __len__(self) -> int:
        size = len(cast(Any, self.dataset))
        return size // self.num_replicas if self.drop_last else ceil_div(size, self.num_replicas)


def shard_iterable(
    dataset: IterableDataset, place: tuple[int, int], batch_size: int | None, *, drop_last: bool, seed: int
) -> ShardedIterable:
    """Divide ``dataset`` among the ranks; one that knows its length still does."""
    if getattr(dataset, "_distributed", None) is not None:  # what split_dataset_by_node leaves in it
        raise ValueError(
            f"this {type(dataset).__name__} was divided by split_dataset_by_node already; pass shard=False to"
            " prepare_dataloader, or give it the dataset from before"
        )
    kind = SizedShardedIterable if hasattr(dataset, "__len__") else ShardedIterable
    return kind(dataset, place, batch_size, drop_last=drop_last, seed=seed)


class _Reader(Iterator[Any]):
    """The samples of a dataset, which sees no other worker, by which it might divide itself, and draws random
    numbers of its own.
    """

    def __init__(self, dataset: Iterable[Any], seed: int) -> None:
        self._numbers: tuple[Any, ...] | None = None
        with self._alone(seed):
            self._samples = iter(dataset)

    def __next__(self) -> Any:
        with self._alone():
            return next(self._samples)

    @contextmanager
    def _alone(self, seed: int | None = None) -> Iterator[None]:
        outside, torch_worker._worker_info = torch_worker._worker_info, None
        numbers = _numbers()
        if seed is None:
            assert self._numbers is not None
            _use_numbers(self._numbers)
        else:
            _seed(seed)
        try:
            yield
        finally:
            self._numbers = _numbers()
            _use_numbers(numbers)
            torch_worker._worker_info = outside


def _numbers() -> tuple[Any, ...]:
    np = sys.modules.get("numpy")
    return random.getstate(), None if np is None else np.random.get_state(), torch.get_rng_state()


def _use_numbers(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])
    torch.set_rng_state(state[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    if (np := sys.modules.get("numpy")) is not None:
        np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # not those of devices
