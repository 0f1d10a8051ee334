"""Checkpoints of models and optimizers whose tensors are whole on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.checkpoint_io.base import CheckpointIO
from colossalai.checkpoint_io.files import load_shard_state_dict, save_state_dict
from colossalai.checkpoint_io.fitting import check_shapes, report_names
from colossalai.checkpoint_io.index import CheckpointIndexFile
from colossalai.checkpoint_io.names import GROUPS_NAME, Kind, add_variant, get_base_filenames
from colossalai.checkpoint_io.sharding import (
    ShardedWriter,
    collect_from_states,
    read_shards,
    shard_checkpoint,
    spread_over_states,
    survey_shards,
)
from colossalai.interface import below_compile, user_module
from colossalai.interface.holding import MASTERS_KEY
from colossalai.utils.optimizer_state import check_state

State = dict[str, Any]
Shards = Iterable[tuple[dict[Any, Any], float]]


@dataclass
class Names:
    """Names in files, which are those of the serial model, and what they are here."""

    here: dict[str, list[str]]
    elsewhere: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        rename = getattr(module, "serial_name", str)
        here: dict[str, list[str]] = {}
        for name in module.state_dict(keep_vars=True):
            here.setdefault(rename(name), []).append(name)
        return cls(here)

    def local(self, stored: str) -> list[str]:
        """The tensors of this rank that get the stored one; one that nobody knows goes under its own name, to be reported."""
        return self.here.get(stored, [] if stored in self.elsewhere else [stored])


class GeneralCheckpointIO(CheckpointIO):
    """One process, or one process that writes for many (``ReplicatedCheckpointIO``).

    Nothing is cut here, so ``gather_dtensor`` has nothing to gather; a DTensor in the state is an error.
    """

    def run_write(self, write: Callable[[], None]) -> None:
        """Everything that touches the disk goes through here, after the state was collected on every rank."""
        write()

    def fit(self, value: Any, target: Tensor | None) -> Any:
        """A loaded value as it goes into ``target``, a weight, or the parameter that a state belongs to."""
        return value

    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool
    ) -> None:
        state = user_module(model).state_dict()
        self.run_write(partial(save_state_dict, state, checkpoint, use_safetensors))

    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        gather_dtensor: bool,
        variant: str | None,
        size_per_shard: float,
        use_safetensors: bool,
    ) -> None:
        shards = shard_checkpoint(user_module(model).state_dict(), size_per_shard)
        self.run_write(partial(write_model_shards, shards, checkpoint, variant, use_safetensors))

    def load_unsharded_model(self, model: nn.Module, checkpoint: Path, strict: bool) -> None:
        state = load_shard_state_dict(checkpoint)
        check_shapes(user_module(model), state, checkpoint)
        self.load_weights(model, [(checkpoint, state)], checkpoint, strict)

    def load_sharded_model(self, model: nn.Module, index_file_path: Path, strict: bool) -> None:
        index = CheckpointIndexFile.from_file(index_file_path)
        for path, state in survey_shards(index):  # all of them, before the first changes the model
            check_shapes(user_module(model), state, path)
        self.load_weights(model, read_shards(index), index_file_path, strict)

    def save_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path, gather_dtensor: bool) -> None:
        self.run_write(partial(save_state_dict, optimizer.state_dict(), checkpoint))

    def save_sharded_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
    ) -> None:
        states, groups = spread_over_states(optimizer.state_dict())
        shards = shard_checkpoint(states, size_per_shard)
        self.run_write(partial(write_optimizer_shards, shards, groups, checkpoint, prefix))

    def load_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path) -> None:
        state = load_shard_state_dict(checkpoint)
        self._load_states(optimizer, state, [state.pop("state", {})], checkpoint)

    def load_sharded_optimizer(self, optimizer: Optimizer, index_file_path: Path) -> None:
        index = CheckpointIndexFile.from_file(index_file_path)
        groups_file = index.param_groups_file()
        if groups_file is None:
            raise RuntimeError(
                f"{index_file_path} is not the index of an optimizer checkpoint: its metadata names no param_groups"
            )
        for _ in survey_shards(index):  # refuses what is damaged before much is read
            pass
        groups = load_shard_state_dict(index_file_path.parent / groups_file)
        parts = collect_from_states((shard for _, shard in read_shards(index)), groups)
        self._load_states(optimizer, groups, parts, index_file_path)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        self.run_write(partial(save_state_dict, lr_scheduler.state_dict(), checkpoint))

    def names(self, module: nn.Module) -> Names:
        """What the tensors of ``module`` are called in files, and which names of files are not for this rank."""
        return Names.of(module)

    def load_weights(
        self, model: nn.Module, parts: Iterable[tuple[Path, State]], checkpoint: Path, strict: bool
    ) -> None:
        """Load part by part; what no part has is missing, unless the model ties it to something that was loaded."""
        module = user_module(model)
        own, names = module.state_dict(keep_vars=True), self.names(module)
        missing, unexpected = list(own), []
        for path, state in parts:
            state = {
                name: self.fit(value, own.get(name))
                for stored, value in state.items()
                for name in names.local(stored)
            }
            try:
                # a wrapper whose weights lie elsewhere loads them there
                result = below_compile(model).load_state_dict(state, strict=False)
            except RuntimeError as error:
                raise RuntimeError(f"{path} does not fit the model: {error}") from error
            absent = set(result.missing_keys)
            missing = [name for name in missing if name in absent]
            unexpected += result.unexpected_keys
        loaded = {id(value) for name, value in own.items() if name not in missing}
        rename = getattr(module, "serial_name", str)
        missing = [rename(name) for name in missing if id(own[name]) not in loaded]
        report_names(module, checkpoint, missing, unexpected, strict)

    def _load_states(
        self, optimizer: Optimizer, rest: State, parts: Iterable[dict[Any, Any]], checkpoint: Path
    ) -> None:
        """``parts`` hold the states of parameters by number, ``rest`` what else is in an optimizer's state dict."""
        try:
            owners = _owners(optimizer, rest.get("param_groups", []))
            states = {
                number: {name: self.fit(value, owners.get(number)) for name, value in state.items()}
                for part in parts
                for number, state in part.items()
            }
            if MASTERS_KEY in rest:
                masters = {n: self.fit(v, owners.get(int(n))) for n, v in rest[MASTERS_KEY].items()}
                rest = {**rest, MASTERS_KEY: masters}
            check_state(optimizer, {"state": states, **rest})
            optimizer.load_state_dict({"state": states, **rest})
        except (KeyError, ValueError) as error:
            raise ValueError(f"{checkpoint} does not fit the optimizer: {error}") from error


def write_model_shards(
    shards: Shards, folder: Path, variant: str | None = None, use_safetensors: bool = False
) -> None:
    """Write a folder of weights; the shards may be made one by one."""
    with ShardedWriter(folder, *get_base_filenames(variant, use_safetensors)) as writer:
        total = 0.0
        for shard, size in shards:
            writer.add_shard(shard, use_safetensors)
            total += size
        writer.publish(total)


def write_optimizer_shards(shards: Shards, groups: State, folder: Path, prefix: str | None = None) -> None:
    """Write a folder of an optimizer's states and, beside them, its ``groups``."""
    with ShardedWriter(folder, *get_base_filenames(prefix, kind=Kind.OPTIMIZER)) as writer:
        total = 0.0
        for shard, size in shards:
            writer.add_shard(shard)
            total += size
        writer.add_param_groups(add_variant(GROUPS_NAME, prefix), groups)
        writer.publish(total)


def _owners(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> dict[Any, Tensor]:
    """The parameters by the numbers of the checkpoint; groups that do not match are refused later."""
    own = [group["params"] for group in optimizer.param_groups]
    saved = [group["params"] for group in saved_groups]
    return {
        number: p
        for numbers, params in zip(saved, own, strict=False)
        for number, p in zip(numbers, params, strict=False)
    }
