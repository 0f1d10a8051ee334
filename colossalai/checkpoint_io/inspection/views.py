"""Checkpoints as people look at them: what is in one, of whatever form, without the model it belongs to.

A ``View`` lists tensors without reading their values, gives one of them at a time, and can
look for faults, going on after each.  ``finding`` finds the form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from colossalai.checkpoint_io.byte_io import dtype_of
from colossalai.checkpoint_io.files.sharding import CheckpointIndexFile
from colossalai.checkpoint_io.files.state_file import (
    check_tensor,
    damaged_records,
    flatten,
    is_archive,
    is_safetensors,
    read_checksums,
    same_memory,
    survey_file,
    unreadable,
)
from colossalai.checkpoint_io.json_values import decode
from colossalai.checkpoint_io.runs.data_file import StoredFile
from colossalai.checkpoint_io.runs.manifest import MANIFEST, left_behind, read_manifest
from colossalai.checkpoint_io.runs.reading import RunReader
from colossalai.checkpoint_io.runs.run_state import RANDOM

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

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of checkpoint: ``run``, ``training``, ``model``, ``optimizer`` or ``values``.

        ``training`` is a file of ``colossalai.utils.save_checkpoint``.
        """

    def prefix(self, section: str) -> str:
        """What stands before the names of the weights of a model."""
        return ""

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


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateFile(ABC):
    """``specs`` are all tensors, ``ties`` those among them that are further names of others."""

    format: str
    has_checksums: bool

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        self.ties: dict[str, str] = {}

    @abstractmethod
    def read(self, name: str) -> Tensor: ...

    @abstractmethod
    def faults(self, advance: Callable[[int], object]) -> Iterator[tuple[str | None, str]]:
        """Each with the tensor that it is about."""

    def top_names(self) -> set[str]:
        """The names by which an index knows what is here."""
        return set(self.specs)

    def facts(self) -> dict[str, Any]:
        """What else the file says."""
        return {}


class SafetensorsFile(StateFile):
    format = "safetensors"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from safetensors import safe_open

        try:
            self._file = safe_open(path, framework="pt", device="cpu")
            self._sums = read_checksums(self._file.metadata())
            for name in self._file.keys():  # noqa: SIM118 - not a dict
                part = self._file.get_slice(name)
                self.specs[name] = Spec(tuple(part.get_shape()), dtype_of(part.get_dtype()))
        except Exception as error:
            raise unreadable(path, error) from error
        metadata = self._file.metadata() or {}
        self.ties = {name: to for name, to in metadata.items() if to in self.specs and name not in self.specs}
        self.specs |= {name: self.specs[to] for name, to in self.ties.items()}
        self.has_checksums = self._sums is not None

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self.ties.get(name, name))
        return tensor

    def faults(self, advance: Callable[[int], object]) -> Iterator[tuple[str | None, str]]:
        for name, spec in self.specs.items():
            if name in self.ties:
                continue
            try:
                check_tensor(name, self.read(name), self._sums)
            except Exception as error:
                yield name, str(error)
            advance(spec.nbytes)
        yield from ((name, "it is missing") for name in self._sums or {} if name not in self.specs)


class TorchFile(StateFile):
    format = "torch.save"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_checksums = is_archive(path)
        self._state = survey_file(path)
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}
        first: dict[Any, str] = {}
        for name, value in flatten(self._state):
            if not isinstance(value, Tensor):
                self._values[name] = value
                continue
            self._tensors[name] = value
            self.specs[name] = Spec(tuple(value.shape), value.dtype)
            key = same_memory(value)
            if key is not None and first.setdefault(key, name) != name:
                self.ties[name] = first[key]

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def faults(self, advance: Callable[[int], object]) -> Iterator[tuple[str | None, str]]:
        for name in damaged_records(self.path):
            yield name, "its checksum does not agree with what was written"
        advance(sum(spec.nbytes for name, spec in self.specs.items() if name not in self.ties))

    def top_names(self) -> set[str]:
        return set(map(str, self._state))

    def facts(self) -> dict[str, Any]:
        short = {name: value for name, value in self._values.items() if _is_short(value)}
        return {name: value for name, value in short.items() if ".params." not in f".{name}"}


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) and len(str(value)) < 80


def open_state_file(path: Path) -> StateFile:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return SafetensorsFile(path) if is_safetensors(path) else TorchFile(path)


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
    def kind(self) -> str:
        names = self._file.top_names()
        rows = [("training", {"epoch", "model"}), ("optimizer", {"state", "param_groups"})]
        plain = "model" if self.items else "values"
        return next((kind for kind, needed in rows if needed <= names), plain)

    def prefix(self, section: str) -> str:
        return f"{section}." if self.kind == "training" else ""

    @property
    def has_checksums(self) -> bool:
        return self._file.has_checksums

    def read(self, name: str) -> Tensor:
        return self._file.read(name)

    def faults(self, advance: Advance) -> Iterator[Fault]:
        for tensor, what in self._file.faults(advance):
            yield Fault(self.path, what, tensor)


class ShardsView(View):
    """A folder with an index, as Hugging Face has them: weights, or states and groups of an optimizer."""

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

    @property
    def kind(self) -> str:
        return "model" if self.index.param_groups_file() is None else "optimizer"

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
    groups = index.param_groups_file()
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


class RunView(View):
    """A checkpoint of a run; ``facts`` has the plan that wrote it, and what the script added."""

    form = "a run (booster.save)"
    has_checksums = True
    kind = "run"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.manifest = read_manifest(folder)
        self._reader = RunReader(folder, self.manifest)
        self.items = [
            Item(t.name, t.shape, t.dtype, tuple(dict.fromkeys(stored.file for stored in t.boxes)))
            for t in self.manifest.tensors.values()
        ]
        self.ties = self.manifest.ties
        self.facts = {
            "number": self.manifest.number,
            "written by": f"colossalai {self.manifest.library}, torch {self.manifest.torch}",
            "plan": self.manifest.plan,
            "extra": self.extra,
        }

    @property
    def extra(self) -> dict[str, Any]:
        """What the training script saved beside the run: the step, the epoch."""
        found = decode(self.manifest.values.get("extra", {}), "extra")
        return found if isinstance(found, dict) else {}

    def prefix(self, section: str) -> str:
        return f"{section}/"

    def read(self, name: str) -> Tensor:
        return self._reader.whole(self.manifest.tensors[name])

    def faults(self, advance: Advance) -> Iterator[Fault]:
        opened = yield from self._open()
        for tensor in self.manifest.tensors.values():
            for stored in tensor.boxes:
                file = opened[stored.file]
                if file is not None:
                    try:
                        file.check(tensor.key(stored.box), tensor.dtype, stored.box.sizes, stored.crc)
                    except (RuntimeError, OSError) as error:
                        what = str(error).removeprefix(f"{file.path} ")
                        yield Fault(file.path, what, tensor.name)
                advance(stored.box.numel * tensor.dtype.itemsize)
        yield from self._absent_ranks()
        if all(file is not None for file in opened.values()):
            for path, key in self._reader.unnamed():
                yield Fault(
                    path, f"{MANIFEST} does not name it; it was edited, or is of another save", key or None
                )

    def _open(self) -> Any:
        """The data files; None for one that cannot be read, of which all tensors are named."""
        opened: dict[str, StoredFile | None] = {}
        for name in self.manifest.files:
            opened[name] = None
            path = self.path / name
            try:
                opened[name] = StoredFile(path)
            except (RuntimeError, OSError) as error:
                what = str(error).removeprefix(f"{path} ")
                for tensor in self.manifest.tensors.values():
                    if any(stored.file == name for stored in tensor.boxes):
                        yield Fault(path, what, tensor.name)
        return opened

    def _absent_ranks(self) -> Iterator[Fault]:
        """Every rank stores its random state; one that has none was lost."""
        saved = self.manifest.values.get(RANDOM)
        for rank in range(saved.get("world", 0) if isinstance(saved, dict) else 0):
            if f"{RANDOM}/{rank}" not in self.manifest.tensors:
                yield Fault(
                    self.path / MANIFEST, "the random state of this rank is missing", f"{RANDOM}/{rank}"
                )

    def leftovers(self) -> list[Path]:
        """Files of a save that was interrupted; the next save removes them."""
        return sorted(left_behind(self.path, set(self.manifest.files)))
