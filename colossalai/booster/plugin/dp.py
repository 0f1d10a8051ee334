"""``DPPluginBase``: the base of all plugins with data parallelism."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from colossalai.booster.mixed_precision import PRECISIONS
from colossalai.booster.plugin.base import Configured, Plugin
from colossalai.checkpoint_io import CheckpointIO, GatheredCheckpointIO
from colossalai.interface import below_compile
from colossalai.utils import get_dataloader
from colossalai.utils.dataloader import check_not_empty
from colossalai.utils.parallel import averaging_group, data_place
from colossalai.utils.sharded_iterable import shard_iterable

_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def host_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """The ranks of ``group`` over gloo, for messages of one ``purpose`` that must not meet others; made once,
    by all of them.
    """
    made = _host_groups.setdefault(group, {})
    if purpose not in made:
        ranks = dist.get_process_group_ranks(group)
        made[purpose] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made[purpose]


class Synchronized(Protocol):
    """A model whose gradients are averaged over the replicas, unless told otherwise."""

    def no_sync(self) -> AbstractContextManager[None]: ...


class DPPluginBase(Plugin):
    """A plan in which every rank has the same weights and computes with other tokens.

    What it answers the booster is what most such plans answer; a plan overrides where it differs, and gives
    ``wrap``. It divides and averages over ``divided_over``, and what a row axis cuts (experts) over those of
    them that hold the same piece (``utils.parallel.averaging_group_of``). ``rank`` and ``world_size`` count
    those that read different data: fewer, where the ranks of one sequence read the same.

    Args:
        process_group: the ranks to divide and average over; if left out, those of the launched config that
            have the same weights: the data-parallel ones, with all ranks of cut sequences.
    """

    model_type: ClassVar[type[Synchronized] | None] = (
        None  # of the model that ``wrap`` returns, if it has ``no_sync``
    )

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{type(self).__name__} needs the distributed environment, also for one process: call"
                " colossalai.launch_from_torch() first and start the script with `colossalai run` or torchrun"
            )
        everyone: Any = dist.group.WORLD
        self._group: dist.ProcessGroup = process_group or averaging_group() or everyone
        self.rank, self.world_size = data_place(self.divided_over())

    def divided_over(self) -> list[int]:
        """The ranks that the plan divides and averages over."""
        return dist.get_process_group_ranks(self._group)

    def supported_devices(self) -> list[str]:
        return ["cpu", "cuda"]

    def supported_precisions(self) -> list[str]:
        return list(PRECISIONS)

    def control_precision(self) -> bool:
        return False

    def control_device(self) -> bool:
        return False

    def support_no_sync(self) -> bool:
        return self.model_type is not None

    def control_checkpoint_io(self) -> bool:
        return True

    def get_checkpoint_io(self) -> CheckpointIO:
        return GatheredCheckpointIO()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        return *self.wrap(model, optimizer), criterion, dataloader, lr_scheduler

    def wrap(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """The model and the optimizer under this plan; the other objects of ``configure`` stay as they
        are.
        """
        # not abstract: a plugin may override configure instead
        raise TypeError(
            f"{type(self).__name__} needs a method wrap(model, optimizer), or a configure of its own"
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        model = below_compile(model)
        if self.model_type is None or not isinstance(model, self.model_type):
            raise TypeError(
                f"no_sync needs the model that booster.boost returned under {type(self).__name__}, got"
                f" {type(model).__name__}"
            )
        return model.no_sync()

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        *,
        shard: bool = True,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of this replica's part of ``dataset``.

        Every replica gets equally many samples: some are repeated to fill up, or with ``drop_last`` left out.
        With ``shuffle``, every pass has a new order; ``dataloader.sampler.set_epoch(epoch)`` chooses which.
        Workers are seeded from ``seed``, each differently.  Further keywords are those of
        ``torch.utils.data.DataLoader``.

        Of an ``IterableDataset`` each rank (and each worker) reads all samples and keeps its own, in turn, so
        it must give the same everywhere.  What it draws from the random numbers of python, numpy or torch is
        the same everywhere, and another in each pass; generators of its own must have a seed.

        Args:
            batch_size: samples per replica and step.
            shard: False leaves an ``IterableDataset`` alone that shards itself by rank and by worker, such as
                one of ``datasets.distributed.split_dataset_by_node``; it must end after equally many batches
                on every rank.
        """
        _check_loadable(dataset, shuffle, shard, kwargs)
        if isinstance(dataset, IterableDataset):
            place = (self.rank, self.world_size)
            if shard:
                dataset = shard_iterable(dataset, place, batch_size, drop_last=drop_last, seed=seed)
            kwargs["add_sampler"] = False
        dataloader = get_dataloader(
            dataset,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            place=(self.rank, self.world_size),
            batch_size=batch_size,
            **kwargs,
        )
        check_not_empty("the loader of prepare_dataloader", dataloader)
        return dataloader


def check_backend(device: torch.device) -> None:
    """Refuse a model whose tensors the process group cannot exchange."""
    if device.type == "cpu" and dist.get_backend() == "nccl":
        raise RuntimeError(
            "the model is on the CPU, whose tensors the backend 'nccl' cannot exchange; launch with"
            " backend='gloo', or leave out device='cpu'"
        )


def _check_loadable(dataset: Dataset, shuffle: bool, shard: bool, options: dict[str, Any]) -> None:
    if taken := sorted({"sampler", "batch_sampler"} & options.keys()):
        raise TypeError(
            "prepare_dataloader makes the sampler itself, so that each rank reads its own part; got"
            f" {taken[0]}. Build a torch DataLoader to use another"
        )
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError(
                f"prepare_dataloader(shuffle=True) cannot choose the order of an IterableDataset ({name});"
                " shuffle inside of it, by the same seed on every rank"
            )
        return
    if not shard:
        raise ValueError(
            f"prepare_dataloader(shard=False) is for an IterableDataset that shards itself, got {name}; build"
            " a torch DataLoader to read all of a dataset on every rank"
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"prepare_dataloader needs a dataset with a length to divide among the ranks, or an"
            f" IterableDataset, got {name}; let it inherit from torch.utils.data.IterableDataset"
        )
    if len(dataset) == 0:
        raise ValueError(f"prepare_dataloader got an empty dataset ({name})")
