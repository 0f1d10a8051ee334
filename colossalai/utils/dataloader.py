"""Data loaders in which each data-parallel rank reads its share of the dataset.

Ranks that work on the same samples (one tensor- or pipeline-parallel group) must also see the same random
augmentations, so everything random here depends on the data-parallel rank, never on the global one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from colossalai._numeric import ceil_div
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.registry import DATA_SAMPLERS
from colossalai.utils.sharded_iterable import ShardedIterable


@DATA_SAMPLERS.register_module
class DataParallelSampler(Sampler[int]):
    """The indices of this data-parallel rank: every rank gets equally many, together they cover the dataset.

    When the dataset does not divide evenly, some samples appear twice, or, with ``drop_last``, the rest is
    left out.  ``place`` is (rank, ranks) where it is not the data-parallel place of the launched job.  With
    ``shuffle``, each pass has another order: the n-th pass is drawn from ``seed + n``, so every rank must
    start equally many passes (``set_epoch`` sets n for the next one).
    """

    def __init__(
        self,
        dataset: Dataset,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        *,
        place: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start, self.start_epoch = 0, 0
        self.rank, self.num_replicas = place or data_parallel_place()
        size = len(cast(Sized, dataset))
        self.num_samples = size // self.num_replicas if drop_last else ceil_div(size, self.num_replicas)
        if self.num_samples == 0:
            raise ValueError(
                f"a dataset of {size} samples has none for each of {self.num_replicas} data-parallel ranks; "
                f"use a larger dataset, fewer ranks or drop_last=False"
            )

    def __iter__(self) -> Iterator[int]:
        indices = self._order(len(cast(Sized, self.dataset)))
        start, self.start = self.first_sample, 0
        self.epoch += 1
        total = self.num_samples * self.num_replicas
        while len(indices) < total:
            indices += indices[: total - len(indices)]
        return iter(indices[start + self.rank : total : self.num_replicas])

    @property
    def first_sample(self) -> int:
        """The first sample of the next pass, counted over all ranks: 0, unless that pass is resumed."""
        return self.start if self.epoch == self.start_epoch else 0

    def resume(self, epoch: int, start: int) -> None:
        """Let the next pass be pass number ``epoch``, without its first ``start`` samples, counted over all
        ranks.
        """
        self.epoch = self.start_epoch = epoch
        self.start = start

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be pass number ``epoch``."""
        self.epoch = epoch

    def _order(self, size: int) -> list[int]:
        if not self.shuffle:
            return list(range(size))
        return torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()


class PositionedDataLoader(DataLoader):
    """A ``DataLoader`` that knows how far its present pass is, so that another one can go on there.

    The position is counted in samples over all data-parallel ranks: a job with other ranks, or another batch
    size, goes on with the same sample.  A loader with a ``DataParallelSampler`` starts there; a
    ``ShardedIterable`` reads the samples before it once more, and any other loader the batches before it.
    """

    _batches = 0  # of the present pass, as handed out
    _skipped = 0  # samples of that pass, over all ranks, that were handed out before it was resumed
    _to_skip = 0  # batches that the next pass leaves out
    _epoch = 0  # the number of the present pass
    _is_in_pass = False
    samples_behind = 0
    """This rank's samples of the present pass that were handed out before the pass was resumed."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        own, stream = self._own_sampler(), self._own_stream()
        self._skipped = own.first_sample if own is not None else stream.start if stream is not None else 0
        divided = own or stream
        self._epoch = self._epoch if divided is None else divided.epoch
        skip, self._to_skip, self._batches = self._to_skip, 0, 0
        own_skipped = self._skipped // own.num_replicas if own is not None else 0
        self.samples_behind = own_skipped + skip * (self.batch_size or 1)
        self._is_in_pass = True
        batches = super().__iter__()
        if stream is not None and self.num_workers:  # which have copies of it by now
            stream.began()
        return self._counted(batches, skip)

    def _counted(self, batches: Iterator[Any], skip: int) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            if self._batches > skip:
                yield batch
        self._is_in_pass = False
        self._epoch += 1

    def _own_sampler(self) -> DataParallelSampler | None:
        return self.sampler if isinstance(self.sampler, DataParallelSampler) else None

    def _own_stream(self) -> ShardedIterable | None:
        return self.dataset if isinstance(self.dataset, ShardedIterable) else None

    def state_dict(self) -> dict[str, Any]:
        """The number of the pass that the next batch belongs to, and how many samples of it are behind."""
        own, stream = self._own_sampler(), self._own_stream()
        if not self._is_in_pass:
            if stream is not None:
                return {"epoch": stream.epoch, "samples": stream.start}
            if own is None:
                return {"epoch": self._epoch, "samples": self._to_skip * self._per_step()}
            return {"epoch": own.epoch, "samples": own.first_sample}
        done = self._skipped + self._batches * self._per_step()
        total = own.num_samples * own.num_replicas if own is not None else None
        if total is not None and (done >= total or (self.drop_last and total - done < self._per_step())):
            return {"epoch": self._epoch + 1, "samples": 0}
        return {"epoch": self._epoch, "samples": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where ``state_dict`` was asked."""
        own, stream = self._own_sampler(), self._own_stream()
        if own is not None:
            own.resume(int(state["epoch"]), int(state["samples"]))
        elif stream is not None:
            stream.set_epoch(int(state["epoch"]))
            stream.start = int(state["samples"])
            self._iterator = None  # workers that stay have the stream without this start
        else:
            self._epoch, self._to_skip = int(state["epoch"]), int(state["samples"]) // self._per_step()
        self._is_in_pass = False

    def _per_step(self) -> int:
        divided = self._own_sampler() or self._own_stream()
        return (self.batch_size or 1) * (1 if divided is None else divided.num_replicas)


def get_dataloader(
    dataset: Dataset,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    *,
    place: tuple[int, int] | None = None,
    **kwargs: Any,
) -> DataLoader:
    """A ``DataLoader`` for this data-parallel rank; ``batch_size`` (in ``kwargs``) is that of one rank.

    With ``add_sampler``, a ``DataParallelSampler`` divides the dataset; a ``sampler`` or ``batch_sampler`` in
    ``kwargs`` takes its place.  ``seed`` decides the order of the samples and the random numbers of the
    workers. ``place`` is (rank, ranks) where it is not the data-parallel place of the launched job.  Other
    ``kwargs`` go to ``DataLoader``.
    """
    rank, size = place or data_parallel_place()
    own_sampler = kwargs.get("sampler") is not None or kwargs.get("batch_sampler") is not None
    if add_sampler and not own_sampler:
        if not isinstance(dataset, IterableDataset):
            kwargs["sampler"] = DataParallelSampler(dataset, shuffle, seed, drop_last, place=(rank, size))
            shuffle = False
        elif size > 1:
            get_dist_logger().warning_once(
                "get_dataloader cannot divide an IterableDataset: all data-parallel ranks read the same"
                " samples unless the dataset divides them itself; prepare_dataloader of a plugin divides it",
                ranks=[0],
            )
    # torch draws the seeds of its workers (python, numpy, torch) from this generator, anew for each pass
    kwargs.setdefault("generator", torch.Generator().manual_seed(seed + rank))
    return PositionedDataLoader(
        dataset,
        shuffle=shuffle,
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **kwargs,
    )


def data_parallel_place() -> tuple[int, int]:
    """This process's data-parallel rank and the number of such ranks.

    Before a launch all ranks of ``torch.distributed`` count as data-parallel; without that there is one.
    """
    if gpc.is_initialized(ParallelMode.DATA):
        return gpc.get_local_rank(ParallelMode.DATA), gpc.get_world_size(ParallelMode.DATA)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def check_not_empty(name: str, dataloader: Any) -> None:
    """Refuse a data loader that is known to have no batch; ``name`` is what the user calls it."""
    try:
        empty = dataloader is not None and len(dataloader) == 0
    except TypeError:  # it has no length
        return
    if empty:
        raise ValueError(
            f"{name} is empty: it has no batch. Is the dataset empty, or smaller than the batch size with"
            " drop_last=True?"
        )


def warn_if_undivided(name: str, dataloader: Any, ranks: int) -> None:
    """Warn where each of ``ranks`` data-parallel ranks would read all samples; ``name`` says which loader it
    is.
    """
    whole = (RandomSampler, SequentialSampler)
    plain = (
        isinstance(dataloader, DataLoader)
        and type(dataloader.batch_sampler) in (BatchSampler, type(None))
        and type(dataloader.sampler) in whole
    )
    if ranks > 1 and plain:
        get_dist_logger().warning_once(
            f"{name} is not divided: each of {ranks} data-parallel ranks reads all of its samples. A loader"
            " that gives each its part is made by booster.plugin.prepare_dataloader(dataset, ...), or by"
            " colossalai.utils.get_dataloader(dataset, ...) for colossalai.initialize",
            ranks=[0],
        )
