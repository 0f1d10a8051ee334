"""Checkpoints as people look at them: what is in one, of whatever form, without the model it belongs to.

``open_checkpoint`` finds the form.  A ``View`` lists tensors without reading their values, gives one of them at a time, and can
look for faults, going on after each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from colossalai.checkpoint_io.index import CheckpointIndexFile
from colossalai.checkpoint_io.manifest import MANIFEST, checkpoints, is_checkpoint
from colossalai.checkpoint_io.names import INDEX_SUFFIX, Kind, add_variant
from colossalai.checkpoint_io.state_file import StateFile, open_state_file

Advance = Callable[[int], object]  # told the bytes that were just read


@dataclass(frozen=True)
class Item:
    """A tensor of a checkpoint, and the files it lies in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Fault:
    """Something wrong: in which file, with which tensor if it is about one."""

    file: Path
    what: str
    tensor: str | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (str(self.file), self.tensor, self.what)))


@dataclass
class View(ABC):
    """A checkpoint.  ``facts`` are what else it says: who wrote it, under what plan, the step."""

    form: ClassVar[str]
    path: Path
    items: list[Item] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def files(self) -> list[str]:
        return sorted({file for item in self.items for file in item.files})

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The values of a tensor, on the CPU."""

    @abstractmethod
    def faults(self, advance: Advance) -> Iterator[Fault]:
        """Read everything and say what is wrong."""

    @property
    @abstractmethod
    def has_checksums(self) -> bool:
        """Whether damage to the values would be seen."""


class FileView(View):
    """One file: weights, an optimizer's states, or a whole training checkpoint of ``colossalai.utils``."""

    form = "one file"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = open_state_file(path)
        self.items = _items(self._file)
        self.ties = self._file.ties
        self.facts = {"format": self._file.format, **self._file.facts()}

    @property
    def has_checksums(self) -> bool:
        return self._file.has_checksums

    def read(self, name: str) -> Tensor:
        return self._file.read(name)

    def faults(self, advance: Advance) -> Iterator[Fault]:
        for tensor, what in self._file.faults(advance):
            yield Fault(self.path, what, tensor)


class ShardsView(View):
    """A folder with an index, as Hugging Face has them: weights, or with a file of groups an optimizer's states."""

    form = "shards with an index"

    def __init__(self, index_path: Path) -> None:
        super().__init__(index_path)
        self.index = CheckpointIndexFile.from_file(index_path)
        self._opened: dict[str, StateFile] = {}
        self.facts = {f"index: {key}": value for key, value in self.index.metadata.items()}
        for name in self._names():
            file = self._file(name)
            self.facts.setdefault("format", file.format)
            self.items += _items(file)
            self.ties |= file.ties
            if name == self.index.param_groups_file():
                self.facts |= file.facts()
        self._homes = {item.name: item.files[0] for item in self.items}

    def _names(self) -> list[str]:
        groups = self.index.param_groups_file()
        return list(dict.fromkeys([*self.index.weight_map.values(), *([groups] if groups else [])]))

    def _file(self, name: str) -> StateFile:
        if name not in self._opened:
            self._opened[name] = open_state_file(self.path.parent / name)
        return self._opened[name]

    @property
    def has_checksums(self) -> bool:
        return all(self._file(name).has_checksums for name in self._names())

    def read(self, name: str) -> Tensor:
        return self._file(self._homes[name]).read(name)

    def faults(self, advance: Advance) -> Iterator[Fault]:
        yield from shard_faults(self.path, advance)


def shard_faults(index_path: Path, advance: Advance) -> Iterator[Fault]:
    """What is wrong with a folder of shards; needs no more than an index that can be read."""
    index = CheckpointIndexFile.from_file(index_path)
    groups, total = index.param_groups_file(), 0
    for name in dict.fromkeys([*index.weight_map.values(), *([groups] if groups else [])]):
        path = index_path.parent / name
        try:
            file = open_state_file(path)
        except (RuntimeError, OSError) as error:
            yield Fault(path, _without(path, error), _listed(index, name))
            continue
        for tensor, what in file.faults(advance):
            yield Fault(path, what, tensor)
        present = file.top_names()
        for tensor, home in index.weight_map.items():
            if home == name and tensor not in present:
                yield Fault(path, f"the index {index_path.name} says that it is here, and it is not", tensor)
        total += sum(spec.nbytes for spec in file.specs.values()) if name != groups else 0
    said = index.metadata.get("total_size")
    if isinstance(said, int) and total > said > 0:  # less: a file is missing, or tied tensors are counted once
        yield Fault(index_path, f"its files hold {total} bytes of tensors, and it says {said}")


def _listed(index: CheckpointIndexFile, file: str) -> str:
    names = [name for name, home in index.weight_map.items() if home == file]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _without(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path} ")


def _items(file: StateFile) -> list[Item]:
    return [
        Item(name, spec.shape, spec.dtype, (file.path.name,))
        for name, spec in file.specs.items()
        if name not in file.ties
    ]


def find_forms(path: Path) -> list[Path]:
    """The checkpoints that ``path`` means, oldest first: itself, or what lies in that folder.

    A checkpoint of a run is its folder, a folder with an index is the index, and a file is itself.
    """
    if path.is_file():
        return [path.parent if path.name == MANIFEST else path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if is_checkpoint(path):
        return [path]
    names = [name for kind in Kind for name in kind.value]
    single = [p for n in names for p in (path / n, *sorted(path.glob(add_variant(n, "*")))) if p.is_file()]
    shards = {p for p in path.glob(f"*{INDEX_SUFFIX.removesuffix('.json')}*.json") if p.is_file()}
    if found := [*sorted(shards), *(p for p in single if p.name not in _members(shards))]:
        return found
    runs = checkpoints(path) or [p for p in sorted(path.iterdir()) if is_checkpoint(p)]
    if not runs:
        raise FileNotFoundError(
            f"{path} holds no checkpoint: no {MANIFEST} of booster.save in it or in the folders below it, no {' or '.join(names)},"
            " no index of shards"
        )
    return runs


def _members(indices: set[Path]) -> set[str]:
    found: set[str] = set()
    for path in indices:
        try:
            index = CheckpointIndexFile.from_file(path)
        except RuntimeError:  # reported when it is opened
            continue
        found |= {*index.weight_map.values(), *filter(None, [index.param_groups_file()])}
    return found


def open_checkpoint(path: Path) -> View:
    """A view of what ``find_forms`` found."""
    from colossalai.checkpoint_io.viewing_runs import RunView

    if path.is_dir():
        return RunView(path)
    return ShardsView(path) if path.suffix == ".json" else FileView(path)


__all__ = [
    "Advance",
    "Fault",
    "FileView",
    "Item",
    "ShardsView",
    "View",
    "find_forms",
    "open_checkpoint",
    "shard_faults",
]
