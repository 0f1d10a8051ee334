"""Rows of bytes on a disk by name, none of which a failed write can lose.

A row whose write failed is kept in memory.  Whoever looks next hears of it, once, and the next write of that row tries again.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.utils.disk.requests import Pending
from colossalai.utils.disk.store import DiskStore


class Failure(NamedTuple):
    """A row that could not be written."""

    what: str
    nbytes: int
    error: OSError


@dataclass
class Writing:
    """A row on its way to the disk; its memory must not change before ``finish`` has returned."""

    shelf: Shelf
    name: str
    what: str
    data: Tensor
    pending: Pending | None
    error: OSError | None = None
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _finished: bool = False

    def finish(self) -> None:
        """Wait until the row is on the disk, or kept."""
        with self._lock:
            if self._finished:
                return
            try:
                if self.pending is not None:
                    self.pending.wait()
            except OSError as error:
                self.error = error
            if self.error is None:
                self.shelf.kept.pop(self.name, None)
            else:
                self.shelf.kept[self.name] = self.data.view(torch.uint8).clone()
                self.shelf.failures.append(Failure(self.what, self.data.nbytes, self.error))
            self._finished = True


class Shelf:
    """Rows in a file without a name in ``directory`` (None: the one for temporary files)."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.store = DiskStore(directory)
        self.kept: dict[str, Tensor] = {}
        self.failures: list[Failure] = []
        self._writing: dict[str, Writing] = {}

    def write(self, name: str, data: Tensor, what: str) -> Writing:
        """Begin to write ``data``; ``what`` it is, is said where that fails."""
        if (before := self._writing.get(name)) is not None:
            before.finish()
        pending, error = None, None
        try:
            pending = self.store.write(name, data)
        except OSError as failed:  # a full disk is known at once
            error = failed
        self._writing[name] = Writing(self, name, what, data, pending, error)
        return self._writing[name]

    def read(self, name: str, into: Tensor) -> Pending | None:
        """Begin to read; None if it is done already."""
        self._writing[name].finish()
        if name in self.kept:
            into.view(torch.uint8).copy_(self.kept[name])
            return None
        return self.store.read(name, into)

    def free(self, name: str) -> None:
        """Forget a row, if there is one."""
        if name in self._writing:
            self._writing.pop(name).finish()
        self.kept.pop(name, None)
        if name in self.store:
            self.store.free(name)

    def finish(self) -> None:
        """Wait for all writes."""
        for writing in list(self._writing.values()):
            writing.finish()

    def pop_failures(self) -> list[Failure]:
        """What could not be written since the last call."""
        failures, self.failures = self.failures, []
        return failures
