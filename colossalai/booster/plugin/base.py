"""``Plugin``: what a parallel plan does for a ``Booster``.

The booster asks the ``control_*`` questions once, when it is built: for each thing a plugin does not control,
the booster uses its own device placement, mixed precision or checkpoint IO.  ``configure`` then does the
plan's work.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from colossalai.auto_parallel.checkpoint.share import ModelShare
from colossalai.booster.mixed_precision import MixedPrecision
from colossalai.checkpoint_io import CheckpointIO

Configured = tuple[
    nn.Module, Optimizer | None, Callable[..., Any] | None, DataLoader | None, LRScheduler | None
]


class Plugin(ABC):
    """A parallel plan."""

    fills_parameters: ClassVar[bool] = False
    """Whether the plan gives parameters memory that were built without it (``colossalai.lazy``), piece by
    piece; else the booster does so before.
    """

    device: torch.device | None = None
    """Where the model computes, for plans that ``control_device``; ``None`` is the default device."""

    @abstractmethod
    def supported_devices(self) -> list[str]:
        """Device types (``'cpu'``, ``'cuda'``) the plan runs on."""

    @abstractmethod
    def supported_precisions(self) -> list[str]:
        """Names that ``Booster(mixed_precision=...)`` may have with this plan."""

    @abstractmethod
    def control_precision(self) -> bool:
        """Whether the plan does mixed precision itself; else the booster applies its own before
        ``configure``.
        """

    def take_precision(self, precision: MixedPrecision | str) -> None:
        """The booster was given ``precision``, and the plan controls it: take it, or refuse it.

        By default it is left alone.
        """
        warnings.warn(
            f"{type(self).__name__} controls the precision; mixed_precision={precision!r} has no effect",
            stacklevel=4,
        )

    @abstractmethod
    def control_device(self) -> bool:
        """Whether the plan places the model itself; else the booster does so before ``configure``."""

    @abstractmethod
    def support_no_sync(self) -> bool:
        """Whether gradients can accumulate without being synchronized."""

    def share_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelShare:
        """What a rank will keep of ``model`` and of the states of ``optimizer``, for plans that are made
        before ``configure`` (``auto_checkpoint``).
        """
        raise NotImplementedError(
            f"auto_checkpoint: {type(self).__name__} does not say what it keeps of a model on a rank; leave"
            " plugin out, and give its bytes as reserved"
        )

    def take_room(self, nbytes: int) -> None:
        """Weights, gradients and states will have so many bytes of the device; asked of plans with movable
        bytes.
        """
        raise NotImplementedError(f"{type(self).__name__} moves nothing to the host")

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> Configured:
        """Put the plan into the training objects and return them.

        A model whose call changes comes back in a ``ModelWrapper``, an optimizer whose backward pass,
        clipping or step changes in an ``OptimizerWrapper``; the rest comes back as it is.
        """

    @abstractmethod
    def control_checkpoint_io(self) -> bool:
        """Whether the plan saves and loads itself, through ``get_checkpoint_io``."""

    @abstractmethod
    def get_checkpoint_io(self) -> CheckpointIO:
        """How a model under this plan is saved and loaded."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the gradients of ``model`` are not synchronized."""

    @abstractmethod
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
        """A loader that gives each rank the part of ``dataset`` that is its own under this plan."""
