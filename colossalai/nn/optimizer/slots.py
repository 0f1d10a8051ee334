"""States of parameters in parts of one size, which come and go as a whole.

A slot holds the states of a part of a large parameter, or of several small ones:  an *extent* is the part [start, stop) of a
parameter in the order of its memory, and a slot is a row of bytes with one run of elements for each state, in which the
extents follow each other.  So one transfer moves all states that are updated together, however the parameters are shaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Fields = Sequence[tuple[str, torch.dtype]]  # the states of a parameter

GRAIN = 1024  # parameters are cut at multiples of it, so that vectorized kernels treat each element as they would uncut
RUN = 64  # bytes: runs of elements begin at multiples of it


@dataclass(frozen=True)
class Extent:
    parameter: Tensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, row: Tensor) -> Tensor:
        """This part of a row of all elements."""
        return row[self.start : self.stop]


class Slot:
    """The states ``fields`` of some extents.

    Before it is filled for the first time its states are those that the optimizer holds elsewhere, or start values.
    Afterwards they are in ``memory``, or, where this is None, on the disk.
    """

    def __init__(self, name: str, extents: Sequence[Extent], fields: Fields) -> None:
        self.name = name
        self.extents = tuple(extents)
        self.numel = sum(extent.numel for extent in extents)
        self.on_disk = True  # where it rests
        self.is_filled = False
        self.memory: Tensor | None = None
        self._runs: dict[str, tuple[int, torch.dtype]] = {}
        self.nbytes = 0
        for field, dtype in fields:
            self._runs[field] = (self.nbytes, dtype)
            self.nbytes += -(-self.numel * dtype.itemsize // RUN) * RUN

    def states(self, buffer: Tensor) -> Iterator[tuple[Extent, dict[str, Tensor]]]:
        """Each extent with its states, as views of ``buffer``."""
        runs = {
            field: buffer[begin : begin + self.numel * dtype.itemsize].view(dtype)
            for field, (begin, dtype) in self._runs.items()
        }
        position = 0
        for extent in self.extents:
            part = slice(position, position + extent.numel)
            yield extent, {field: run[part] for field, run in runs.items()}
            position = part.stop


def cut(parameters: Iterable[Tensor], numel: int) -> Iterator[list[Extent]]:
    """The parameters in lists of extents with at most ``numel`` elements together."""
    found: list[Extent] = []
    room = numel
    for parameter in parameters:
        start, end = 0, parameter.numel()
        while start < end:
            size = min(room, end - start)
            if start + size < end:
                size -= size % GRAIN
            if size:
                found.append(Extent(parameter, start, start + size))
            start += size
            room -= size
            if start < end or not room:
                yield found
                found, room = [], numel
    if found:
        yield found
