"""One file of a checkpoint for a look at it: what is in it, one tensor at a time, and what is wrong with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.checkpoint_io.checksums import (
    check_tensor,
    damaged_records,
    flatten,
    is_archive,
    read_checksums,
)
from colossalai.checkpoint_io.dtypes import dtype_of
from colossalai.checkpoint_io.files import is_safetensors, same_memory, survey_file, unreadable


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


__all__ = ["SafetensorsFile", "Spec", "StateFile", "TorchFile", "open_state_file"]
