"""``CheckpointIO``: what a training script can ask for.  How it is done for a plan is the plan's own subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.checkpoint_io.files import load_shard_state_dict
from colossalai.checkpoint_io.names import Kind, add_variant, find_checkpoint, has_index_file


class CheckpointIO(ABC):
    """Save and load models, optimizers and learning-rate schedulers.

    The public methods check their arguments and find the files; a subclass writes and reads them.  ``shard=False``
    means one file of the given name, ``shard=True`` a folder with an index.  On loading, the path may be either, and
    the format is recognized.
    """

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        variant: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Save the weights of ``model``.

        Args:
            checkpoint: a file, or with ``shard`` a folder, which is made if it does not exist.
            shard: write several files of at most ``size_per_shard`` MB and an index.
            gather_dtensor: let a plan that cuts tensors store whole ones.
            variant: a word that goes into the names of the files in a folder.
            use_safetensors: safetensors instead of torch's own format; also if a single file is named ``*.safetensors``.
        """
        path = _target("save_model", checkpoint, shard, size_per_shard, variant)
        if shard:
            self.save_sharded_model(model, path, gather_dtensor, variant, size_per_shard, use_safetensors)
        else:
            by_name = path.suffix == ".safetensors"  # others judge such a file by its name
            self.save_unsharded_model(model, path, gather_dtensor, use_safetensors or by_name)

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> nn.Module:
        """Load weights into ``model`` and return it.  Not ``strict``: missing and unknown tensors are passed over."""
        path = find_checkpoint(checkpoint, Kind.MODEL)
        is_index, _ = has_index_file(path)
        (self.load_sharded_model if is_index else self.load_unsharded_model)(model, path, strict)
        return model

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
    ) -> None:
        """Save the states and parameter groups of ``optimizer``; ``prefix`` is what ``variant`` is for a model."""
        path = _target("save_optimizer", checkpoint, shard, size_per_shard, prefix)
        if shard:
            self.save_sharded_optimizer(optimizer, path, gather_dtensor, prefix, size_per_shard)
        else:
            self.save_unsharded_optimizer(optimizer, path, gather_dtensor)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> Optimizer:
        """Load states and parameter groups into ``optimizer`` and return it."""
        path = find_checkpoint(checkpoint, Kind.OPTIMIZER)
        is_index, _ = has_index_file(path, Kind.OPTIMIZER)
        (self.load_sharded_optimizer if is_index else self.load_unsharded_optimizer)(optimizer, path)
        return optimizer

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None: ...

    def load_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        lr_scheduler.load_state_dict(load_shard_state_dict(checkpoint))

    @abstractmethod
    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        gather_dtensor: bool,
        variant: str | None,
        size_per_shard: float,
        use_safetensors: bool,
    ) -> None: ...

    @abstractmethod
    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool
    ) -> None: ...

    @abstractmethod
    def load_sharded_model(self, model: nn.Module, index_file_path: Path, strict: bool) -> None: ...

    @abstractmethod
    def load_unsharded_model(self, model: nn.Module, checkpoint: Path, strict: bool) -> None: ...

    @abstractmethod
    def save_sharded_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
    ) -> None: ...

    @abstractmethod
    def save_unsharded_optimizer(
        self, optimizer: Optimizer, checkpoint: Path, gather_dtensor: bool
    ) -> None: ...

    @abstractmethod
    def load_sharded_optimizer(self, optimizer: Optimizer, index_file_path: Path) -> None: ...

    @abstractmethod
    def load_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path) -> None: ...


def _target(
    who: str, checkpoint: str | Path, shard: bool, size_per_shard: float, variant: str | None
) -> Path:
    path = Path(checkpoint)
    if shard and path.is_file():
        raise ValueError(
            f"{who}(shard=True) writes a folder, but {path} is a file; pass a folder or shard=False"
        )
    if not shard and path.is_dir():
        raise ValueError(
            f"{who}(shard=False) writes one file, but {path} is a folder; pass a file or shard=True"
        )
    if not isinstance(size_per_shard, Real) or not size_per_shard > 0:
        raise ValueError(
            f"{who} needs size_per_shard, a number of MB, to be more than 0; got {size_per_shard!r}"
        )
    add_variant("name.bin", variant)  # refuses a variant that no file name can hold
    return path
