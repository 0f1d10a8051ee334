"""What all plans with data parallelism share: each replica of the model reads its own part of the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from colossalai.booster.plugin.base import Plugin
from colossalai.utils import get_dataloader
from colossalai.utils.dataloader import check_not_empty


class DPPluginBase(Plugin):
    """A plan in which every rank is a replica.  ``rank`` and ``world_size`` count replicas: a plan whose replicas span
    several ranks sets them to its place on the data axis.
    """

    def __init__(self) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"{type(self).__name__} needs the distributed environment, also for one process: call"
                " colossalai.launch_from_torch() first and start the script with `colossalai run` or torchrun"
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of this replica's part of ``dataset``.

        Every replica gets equally many samples: some are repeated to fill up, or with ``drop_last`` left out.  With
        ``shuffle``, every pass has a new order; ``dataloader.sampler.set_epoch(epoch)`` chooses which.  Workers are
        seeded from ``seed``, each differently.  Further keywords are those of ``torch.utils.data.DataLoader``.

        Args:
            batch_size: samples per replica and step.
        """
        _check_loadable(dataset, kwargs)
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
            "the model is on the CPU, whose tensors the backend 'nccl' cannot exchange; launch with backend='gloo',"
            " or leave out device='cpu'"
        )


def _check_loadable(dataset: Dataset, options: dict[str, Any]) -> None:
    if taken := sorted({"sampler", "batch_sampler"} & options.keys()):
        raise TypeError(
            f"prepare_dataloader makes the sampler itself, so that each rank reads its own part; got {taken[0]}."
            " Build a torch DataLoader to use another"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"prepare_dataloader needs a dataset with a length to divide among the ranks, got"
            f" {type(dataset).__name__}; let it choose its part by rank and build a torch DataLoader"
        )
    if len(dataset) == 0:
        raise ValueError(f"prepare_dataloader got an empty dataset ({type(dataset).__name__})")
