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
from typing import Any, ClassVar

import torch
from torch import Tensor

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
        """What it is of: ``run``, ``training`` (of ``colossalai.utils``), ``model``, ``optimizer`` or ``values``."""

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


__all__ = ["Advance", "Fault", "Item", "View"]
