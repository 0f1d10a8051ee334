"""Models and optimizers in files of whole tensors: one file, or a folder that Hugging Face opens.

``CheckpointIO`` is what a training script can ask for.  ``GeneralCheckpointIO`` writes what one process
holds. ``GatheredCheckpointIO`` brings one tensor at a time together from all ranks, and only the rank that
writes keeps it, on its CPU: all of the file that is being written, never more.  Loading reads the files on
every rank, and each keeps its own part.  So a checkpoint does not know by how many ranks it was written, or
under which plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.checkpoint_io.boxes import whole
from colossalai.checkpoint_io.files.compare import check_shapes, report_names
from colossalai.checkpoint_io.files.gathering import Gathering, OptimizerParts, OwnOptimizer, names_of
from colossalai.checkpoint_io.files.sharding import (
    GROUPS_NAME,
    CheckpointIndexFile,
    FileKind,
    ShardedWriter,
    add_variant,
    find_checkpoint,
    get_base_filenames,
    has_index_file,
    read_shards,
    shard_checkpoint,
    survey_shards,
)
from colossalai.checkpoint_io.files.state_file import load_shard_state_dict, save_state_dict
from colossalai.checkpoint_io.held_tensors import fill, is_piece, pieces_of, serial_shape, shared_mark
from colossalai.checkpoint_io.model_state import ModelState, ParameterNames
from colossalai.checkpoint_io.ranks import JobRanks
from colossalai.checkpoint_io.stored_optimizer import NumberedStates, StoredOptimizer
from colossalai.interface import below_compile, user_module
from colossalai.mesh import PIPELINE_AXIS
from colossalai.utils.optimizer_state import check_state
from colossalai.utils.parallel import launched_mesh

T = TypeVar("T")
State = dict[str, Any]
Shards = Iterable[tuple[dict[Any, Any], float]]
# The attribute of a parameter of an optimizer that is a slice of one of the model; its ``fit`` cuts a loaded
# value.
PIECE = "zero_piece"


class CheckpointIO(ABC):
    """Save and load models, optimizers and learning-rate schedulers.

    The public methods check their arguments and find the files; a subclass writes and reads them.
    ``shard=False`` means one file of the given name, ``shard=True`` a folder with an index.  On loading, the
    path may be either, and the format is recognized.
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
            use_safetensors: safetensors instead of torch's own format; also if a single file is named
                ``*.safetensors``.
        """
        path = _target("save_model", checkpoint, shard, size_per_shard, variant)
        if shard:
            self.save_sharded_model(model, path, gather_dtensor, variant, size_per_shard, use_safetensors)
        else:
            by_name = path.suffix == ".safetensors"  # others judge such a file by its name
            self.save_unsharded_model(model, path, gather_dtensor, use_safetensors or by_name)

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> nn.Module:
        """Load weights into ``model`` and return it.

        Not ``strict``: missing and unknown tensors are passed over.
        """
        path = find_checkpoint(checkpoint, FileKind.MODEL)
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
        """Save the states and parameter groups of ``optimizer``.

        ``prefix`` is what ``variant`` is for a model.
        """
        path = _target("save_optimizer", checkpoint, shard, size_per_shard, prefix)
        if shard:
            self.save_sharded_optimizer(optimizer, path, gather_dtensor, prefix, size_per_shard)
        else:
            self.save_unsharded_optimizer(optimizer, path, gather_dtensor)

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> Optimizer:
        """Load states and parameter groups into ``optimizer`` and return it."""
        path = find_checkpoint(checkpoint, FileKind.OPTIMIZER)
        is_index, _ = has_index_file(path, FileKind.OPTIMIZER)
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


@dataclass
class LocalNames:
    """Names in files, which are those of the serial model, and what they are on this rank."""

    here: dict[str, list[str]]
    elsewhere: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module) -> LocalNames:
        rename = getattr(module, "serial_name", str)
        here: dict[str, list[str]] = {}
        for name in module.state_dict(keep_vars=True):
            here.setdefault(rename(name), []).append(name)
        return cls(here)

    def local(self, stored: str) -> list[str]:
        """The tensors of this rank that get the stored one; an unknown one keeps its name, to be reported."""
        return self.here.get(stored, [] if stored in self.elsewhere else [stored])


class GeneralCheckpointIO(CheckpointIO):
    """Save and load what one process holds, by itself.

    Nothing is cut here, so ``gather_dtensor`` has nothing to gather; a DTensor in the state is an error.
    """

    # What a subclass does in its own way

    def check_gathering(self, gather_dtensor: bool) -> None:
        """Refuse a ``gather_dtensor`` that cannot be obeyed."""

    def run_write(self, write: Callable[[], None], parts: Iterable[Any] = ()) -> None:
        """Let ``write`` write to the disk what it takes from ``parts``."""
        write()

    def model_parts(self, model: nn.Module, size_per_shard: float) -> Iterator[tuple[State, float]]:
        """The state dict of the model in parts of at most ``size_per_shard`` MB, with their sizes."""
        state = user_module(model).state_dict()
        return (
            iter([(state, 0.0)])
            if size_per_shard == float("inf")
            else shard_checkpoint(state, size_per_shard)
        )

    def optimizer_parts(self, optimizer: Optimizer) -> OptimizerParts:
        """The state of the optimizer, in parts."""
        return OptimizerParts.of_state_dict(optimizer)

    def parameter_names(self, optimizer: Optimizer) -> ParameterNames:
        """What the parameters of ``optimizer`` are called in files."""
        return names_of(optimizer)

    def names(self, module: nn.Module) -> LocalNames:
        """The names of the tensors of ``module`` in files, and the names that are not for this rank."""
        return LocalNames.of(module)

    def fit(self, value: Any, target: Tensor | None) -> Any:
        """A loaded value as it goes into ``target``, a weight, or the parameter that a state belongs to."""
        return value

    def together(self, do: Callable[[], T], what: str) -> T:
        """Return what ``do`` returns; if it fails on one of the ranks that ``what`` concerns, all raise."""
        return do()

    # Saving

    def save_unsharded_model(
        self, model: nn.Module, checkpoint: Path, gather_dtensor: bool, use_safetensors: bool
    ) -> None:
        self.check_gathering(gather_dtensor)
        parts = self.model_parts(model, float("inf"))
        self.run_write(lambda: save_state_dict(whole_state(parts, model), checkpoint, use_safetensors), parts)

    def save_sharded_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        gather_dtensor: bool,
        variant: str | None,
        size_per_shard: float,
        use_safetensors: bool,
    ) -> None:
        self.check_gathering(gather_dtensor)
        parts = self.model_parts(model, size_per_shard)
        self.run_write(partial(_write_model_shards, parts, checkpoint, variant, use_safetensors), parts)

    def save_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path, gather_dtensor: bool) -> None:
        self.check_gathering(gather_dtensor)
        state = self.optimizer_parts(optimizer)
        parts = state.parts(float("inf"))
        self.run_write(lambda: save_state_dict(state.file(parts), checkpoint), parts)

    def save_sharded_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Path,
        gather_dtensor: bool,
        prefix: str | None,
        size_per_shard: float,
    ) -> None:
        self.check_gathering(gather_dtensor)
        state = self.optimizer_parts(optimizer)
        parts = state.parts(size_per_shard)
        shards, groups = state.shards(parts), state.stored.groups_file()
        self.run_write(partial(_write_optimizer_shards, shards, groups, checkpoint, prefix), parts)

    def save_lr_scheduler(self, lr_scheduler: LRScheduler, checkpoint: str | Path) -> None:
        self.run_write(partial(save_state_dict, lr_scheduler.state_dict(), checkpoint))

    # Loading

    def load_unsharded_model(self, model: nn.Module, checkpoint: Path, strict: bool) -> None:
        state = load_shard_state_dict(checkpoint)
        check_shapes(user_module(model), state, checkpoint)
        self.load_weights(model, [(checkpoint, state)], checkpoint, strict)

    def load_sharded_model(self, model: nn.Module, index_file_path: Path, strict: bool) -> None:
        index = CheckpointIndexFile.from_file(index_file_path)
        for path, state in survey_shards(index):  # all of them, before the first changes the model
            check_shapes(user_module(model), state, path)
        self.load_weights(model, read_shards(index), index_file_path, strict)

    def load_unsharded_optimizer(self, optimizer: Optimizer, checkpoint: Path) -> None:
        state = load_shard_state_dict(checkpoint)
        self.load_states(optimizer, lambda: StoredOptimizer.open_state_dict(state), checkpoint)

    def load_sharded_optimizer(self, optimizer: Optimizer, index_file_path: Path) -> None:
        index = CheckpointIndexFile.from_file(index_file_path)
        groups_file = index.param_groups_file()
        if groups_file is None:
            raise RuntimeError(
                f"{index_file_path} is not the index of an optimizer checkpoint: its metadata names no"
                " param_groups"
            )
        for _ in survey_shards(index):  # refuses what is damaged before much is read
            pass
        groups = load_shard_state_dict(index_file_path.parent / groups_file)
        parts = (shard for _, shard in read_shards(index))
        self.load_states(
            optimizer, lambda: (StoredOptimizer.from_groups_file(groups), parts), index_file_path
        )

    def load_weights(
        self, model: nn.Module, parts: Iterable[tuple[Path, State]], checkpoint: Path, strict: bool
    ) -> None:
        """Load the weights part by part.

        A tensor that no part has is missing, unless the model ties it to one that was loaded.
        """
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

    def load_states(
        self,
        optimizer: Optimizer,
        opened: Callable[[], tuple[StoredOptimizer, Iterable[NumberedStates]]],
        checkpoint: Path,
    ) -> None:
        """Load the optimizer that ``opened`` reads from a file: its groups, and its states in parts."""
        names = self.parameter_names(optimizer)

        def prepare() -> State:
            stored, parts = opened()
            state = OwnOptimizer(optimizer, names, stored).state_dict(parts, self.fit)
            check_state(optimizer, state)
            return state

        try:
            state = self.together(prepare, "load the optimizer")
            optimizer.load_state_dict(state)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{checkpoint} does not fit the optimizer: {error}") from error


class GatheredCheckpointIO(GeneralCheckpointIO):
    """Save the tensors of all ranks as those of the serial model, and load each rank's part of them.

    Saving is a collective: every rank must call it, and if the one that writes fails (a full disk), all
    raise, so that none waits for it in the next collective.  So is loading into the stages of a pipeline;
    elsewhere every rank loads for itself. ``group`` holds the ranks that take part, by default all; its first
    rank is the one that writes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @property
    def ranks(self) -> JobRanks:
        return JobRanks(self.group)

    def check_gathering(self, gather_dtensor: bool) -> None:
        if not gather_dtensor:
            raise ValueError(
                "gather_dtensor=False asks for a checkpoint of cut tensors, but this plan stores whole ones;"
                " leave it out, or"
                " use booster.save"
            )

    def run_write(self, write: Callable[[], None], parts: Iterable[Any] = ()) -> None:
        """Call ``write`` on the rank that writes; all ranks go through ``parts``, which it takes one by one.

        If it fails, the rest is still gathered there, since the other ranks do not know yet.
        """
        failure: Exception | None = None
        if self.ranks.rank == 0:
            try:
                write()
            except Exception as error:
                failure = error
        for _ in parts:
            pass
        self.ranks.agree(failure, what="write the checkpoint")

    def model_parts(self, model: nn.Module, size_per_shard: float) -> Iterator[tuple[State, float]]:
        """Gather the state dict of the serial model; the last part has the extra states of modules."""
        gathering = Gathering(lambda: ModelState(model).entries(), self.ranks)
        extra: State = {}
        for theirs in reversed(self.ranks.gather(ModelState(model).extra)):
            extra |= theirs
        return _with_extra(gathering, extra, size_per_shard)

    def optimizer_parts(self, optimizer: Optimizer, model: nn.Module | None = None) -> OptimizerParts:
        """Gather the state of the serial optimizer.

        ``model`` names its parameters, by default the one that it was boosted with.
        """
        return OptimizerParts.gathered(optimizer, names_of(optimizer, model), self.ranks)

    def parameter_names(self, optimizer: Optimizer) -> ParameterNames:
        return names_of(optimizer).agree(self.ranks)

    def names(self, module: nn.Module) -> LocalNames:
        """The names that all stages of a pipeline know; a shared tensor has the names of all its stages."""
        found = super().names(module)
        if not _has_stages():
            return found
        own = {name: shared_mark(t) for name, t in module.state_dict(keep_vars=True).items()}
        marks = {serial: own[names[0]] for serial, names in found.here.items()}
        for theirs in self.ranks.gather(marks):
            found.elsewhere |= theirs.keys()
            for serial, mark in theirs.items():
                for here in [name for name, own_mark in marks.items() if mark and own_mark == mark]:
                    found.here.setdefault(serial, found.here[here])
        return found

    def fit(self, value: Any, target: Any) -> Any:
        """Cut a whole tensor like ``target``.

        A tensor of another shape is returned as it is: a count, or a misfit that is refused later.
        """
        if (piece := getattr(target, PIECE, None)) is not None:
            return piece.fit(self.fit(value, piece.param))
        if not isinstance(target, Tensor) or not isinstance(value, Tensor) or value.shape == ():
            return value
        if tuple(value.shape) != serial_shape(target) or not is_piece(target):
            return value
        room = torch.empty_like(target, dtype=value.dtype, requires_grad=False)
        own = pieces_of(target, room, launched_mesh(), "a tensor of the checkpoint")
        fill(own, whole(tuple(value.shape)), value)
        return room

    def load_weights(
        self, model: nn.Module, parts: Iterable[tuple[Path, State]], checkpoint: Path, strict: bool
    ) -> None:
        load = super().load_weights
        self.together(lambda: load(model, parts, checkpoint, strict), "load the model")

    def together(self, do: Callable[[], T], what: str) -> T:
        """Let all stages of a pipeline fail if one does: what one of them lacks, the others do not know."""
        if not _has_stages():
            return do()
        result, failure = None, None
        try:
            result = do()
        except Exception as error:
            failure = error
        self.ranks.agree(failure, what=what)
        return result  # type: ignore[return-value]


ReplicatedCheckpointIO = (
    GatheredCheckpointIO  # an older name: where every rank holds everything, nothing is gathered
)


def whole_state(parts: Iterable[tuple[State, float]], model: nn.Module) -> State:
    """Join ``parts`` to one state dict, with the versions of the modules of ``model``, which torch reads."""
    state: State = OrderedDict()
    for part, _ in parts:
        state |= part
    state._metadata = getattr(user_module(model).state_dict(keep_vars=True), "_metadata", None)  # type: ignore[attr-defined]
    return state


def _with_extra(gathering: Gathering, extra: State, size_per_shard: float) -> Iterator[tuple[State, float]]:
    waiting: tuple[State, float] | None = None
    for part, size in gathering.parts(size_per_shard):
        if waiting is not None:
            yield waiting
        waiting = {name.removeprefix("model/"): value for name, value in part.items()}, size
    found, size = waiting or ({}, 0.0)
    if found or extra:
        yield found | extra, size


def _write_model_shards(
    shards: Shards, folder: Path, variant: str | None = None, use_safetensors: bool = False
) -> None:
    """Write a folder of weights; the shards may be made one by one."""
    with ShardedWriter(folder, *get_base_filenames(variant, use_safetensors)) as writer:
        total = 0.0
        for shard, size in shards:
            writer.add_shard(shard, use_safetensors)
            total += size
        writer.publish(total)


def _write_optimizer_shards(shards: Shards, groups: State, folder: Path, prefix: str | None = None) -> None:
    """Write a folder of an optimizer's states and, beside them, its ``groups``."""
    with ShardedWriter(folder, *get_base_filenames(prefix, kind=FileKind.OPTIMIZER)) as writer:
        total = 0.0
        for shard, size in shards:
            writer.add_shard(shard)
            total += size
        writer.add_param_groups(add_variant(GROUPS_NAME, prefix), groups)
        writer.publish(total)


def _has_stages() -> bool:
    mesh = launched_mesh()
    return mesh is not None and mesh.size.get(PIPELINE_AXIS, 1) > 1


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
