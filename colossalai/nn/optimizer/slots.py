"""States of parameters in parts of one size, which come and go as a whole.

A slot holds the states of a part of a large parameter, or of several small ones:  an *extent* is the part [start, stop) of a
parameter in the order of its memory, and a slot is a row of bytes with one run of elements for each state, in which the
extents follow each other.  So one transfer moves all states that are updated together, however the parameters are shaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossalai.kernel.split import tail_of

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

    def __init__(
        self, name: str, extents: Sequence[Extent], fields: Fields, what: str = "optimizer states"
    ) -> None:
        self.name, self.what = name, what
        self.extents = tuple(extents)
        self.numel = sum(extent.numel for extent in extents)
        self.on_disk = True  # where it rests
        self.is_filled = False
        self.memory: Tensor | None = None
        self.set_fields(fields)

    def set_fields(self, fields: Fields) -> None:
        """Have a run for each of ``fields``; those that were there before and come first stay where they are."""
        self.fields = tuple(fields)
        self._runs: dict[str, tuple[int, torch.dtype]] = {}
        self.nbytes = 0
        for field, dtype in fields:
            self._runs[field] = (self.nbytes, dtype)
            self.nbytes += -(-self.numel * dtype.itemsize // RUN) * RUN

    def has(self, field: str) -> bool:
        return field in self._runs

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


@dataclass
class Share:
    """Lets ``fraction`` of the bytes rest on the disk, spread evenly."""

    fraction: float
    total: int = 0
    on_disk: int = 0

    def wants(self, nbytes: int) -> bool:
        """Whether the next ``nbytes`` go there."""
        self.total += nbytes
        wanted = self.on_disk + nbytes / 2 <= self.fraction * self.total
        self.on_disk += nbytes * wanted
        return wanted


def slots_for(
    parameters: Iterable[Tensor],
    fields: Fields,
    nbytes: int,
    name: str,
    what: str = "optimizer states",
    whole: bool = False,
) -> list[Slot]:
    """Slots of at most ``nbytes`` for parameters with the same fields; each of its own if it must stay ``whole``."""
    numel = nbytes // max(sum(dtype.itemsize for _, dtype in fields), 1)
    parts: Iterable[list[Extent]] = cut(parameters, max(numel - numel % GRAIN, GRAIN))
    if whole:
        parts = ([Extent(p, 0, p.numel())] for p in parameters)
    return [Slot(f"{name}{n}", extents, fields, what) for n, extents in enumerate(parts)]


def begin(states: Mapping[str, Tensor], known: Mapping[str, Tensor], weight: Tensor) -> None:
    """Fill the states of an extent for the first time: with those that are ``known``, or start values."""
    for name, state in states.items():
        if name == "tail":
            state.copy_(tail_of(known["master"], weight)) if "master" in known else state.zero_()
        elif name in known:
            state.copy_(known[name])
        elif name == "master":
            state.copy_(weight)
        else:
            state.zero_()


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
