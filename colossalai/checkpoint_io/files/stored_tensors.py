"""Tensors in safetensors files, of which pieces are read.

A tensor of the model may be stored as several: files of transformers hold the matrices of single experts,
which the model has as one tensor.  Of these, too, no more is read than a piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PretrainedTensor(NamedTuple):
    """Where a tensor of the model is stored."""

    file: Path
    name: str


@dataclass
class JoinedTensor:
    """A tensor of the model that is stored as several: one for each expert, or ``blocks`` for each, which lie
    one behind the other.
    """

    blocks: int
    parts: dict[tuple[int, int], PretrainedTensor] = field(default_factory=dict)
    """By the numbers of the expert and of the block."""

    @property
    def file(self) -> Path:
        """One of the files."""
        return next(iter(self.parts.values())).file

    @property
    def name(self) -> str:
        return next(iter(self.parts.values())).name

    @property
    def rows(self) -> list[list[PretrainedTensor]] | None:
        """The parts of each expert; None if some are missing."""
        number = 1 + max(number for number, _ in self.parts)
        if len(self.parts) < number * self.blocks:
            return None
        return [[self.parts[n, block] for block in range(self.blocks)] for n in range(number)]


Source = PretrainedTensor | JoinedTensor


class Joins(NamedTuple):
    """Which part of which tensor of the model a stored name is."""

    target: str
    number: int
    block: int
    blocks: int


def joined_names(
    converters: Iterable[Any], rename: Callable[[str, list[Any]], tuple[str, str | None]]
) -> Callable[[str], Joins | None]:
    """A function from stored names to what they are a part of, for those of transformers' ``converters`` that
    stack matrices and join blocks of each, as for experts.

    ``rename`` gives the name in the model that converters make of a stored one, and the pattern that fitted.
    """
    known = [converter for converter in converters if _joins(converter)]
    patterns = {
        pattern: (block, len(converter.source_patterns))
        for converter in known
        for block, pattern in enumerate(converter.source_patterns)
    }

    def find(name: str) -> Joins | None:
        target, pattern = rename(name, known)
        if pattern is None or pattern not in patterns:
            return None
        # the last number, since names of converters end behind that of the expert
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        return Joins(target, int(numbers[-1]), *patterns[pattern]) if numbers else None

    return find


def _joins(converter: Any) -> bool:
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    stack = steps[:1] == [("MergeModulelist", 0)] and all("*" in p for p in converter.source_patterns)
    joined = steps[1:] == [("Concatenate", 1)] or (not steps[1:] and len(converter.source_patterns) == 1)
    return stack and joined and len(converter.target_patterns) == 1


class StoredFiles:
    """Safetensors files, each opened at its first use."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> StoredFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._open[path]

    def part(self, source: Source) -> Any:
        """What tells its shape (``get_shape``) and reads the slices that it is indexed with."""
        if isinstance(source, PretrainedTensor):
            return self._file(source.file).get_slice(source.name)
        assert source.rows is not None
        return _Joined([[self.part(block) for block in blocks] for blocks in source.rows])

    def whole(self, source: Source) -> Tensor:
        if isinstance(source, PretrainedTensor):
            found: Tensor = self._file(source.file).get_tensor(source.name)
            return found
        part = self.part(source)
        read: Tensor = part[tuple(slice(0, size) for size in part.get_shape())]
        return read


class _Joined:
    """Matrices of experts, each of one block or several, as one tensor (experts, ...)."""

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows = rows

    def get_shape(self) -> list[int]:
        shapes = {tuple(tuple(block.get_shape()) for block in blocks) for blocks in self._rows}
        first = next(iter(shapes))
        if len(shapes) > 1 or len({shape[1:] for shape in first}) > 1:
            return []  # that of no tensor
        return [len(self._rows), sum(shape[0] for shape in first), *first[0][1:]]

    def __getitem__(self, chosen: tuple[slice, ...]) -> Tensor:
        return torch.stack([self._of_one(blocks, chosen[1:]) for blocks in self._rows[chosen[0]]])

    @staticmethod
    def _of_one(blocks: Sequence[Any], chosen: tuple[slice, ...]) -> Tensor:
        first, rest = chosen[0], chosen[1:]
        pieces, start = [], 0
        for block in blocks:
            size = block.get_shape()[0]
            begin, end = max(first.start - start, 0), min(first.stop - start, size)
            if begin < end:
                inside = (slice(begin, end), *rest)
                pieces.append(block[inside])
            start += size
        return torch.cat(pieces)
