"""A few buffers of one size that go round between a disk and whoever computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from colossalai.utils.disk.memory import aligned_empty


class Memory(Protocol):
    """Where buffers come from."""

    def get(self, nbytes: int, must: bool) -> Tensor | None:
        """A row of bytes; None if there is no room, or, where it ``must``, an error."""

    def give(self, nbytes: int) -> None:
        """A row of so many bytes is dropped."""


class AnyMemory:
    """As much memory as there is."""

    def get(self, nbytes: int, must: bool) -> Tensor | None:
        return aligned_empty(nbytes)

    def give(self, nbytes: int) -> None:
        """Whoever drops a tensor frees it."""


class Buffers:
    """At most ``most`` buffers; used by one thread at a time.

    A buffer that is given back with ``wait`` is used again when that has returned.
    """

    def __init__(self, most: int, memory: Memory | None = None) -> None:
        self.most, self.memory = most, memory or AnyMemory()
        self.nbytes = self.made = 0
        self._free: list[Tensor] = []
        self._busy: deque[tuple[Tensor, Callable[[], None]]] = deque()

    @property
    def missing_bytes(self) -> int:
        """What may still be taken of the memory."""
        return (self.most - self.made) * self.nbytes

    def fit(self, nbytes: int) -> None:
        """Buffers have at least this size from now on."""
        if nbytes > self.nbytes:
            self.land_all()
            for _ in self._free:
                self._drop(self.nbytes)
            self._free.clear()
            self.nbytes = nbytes

    def get(self, *, wait: bool = True, must: bool = True) -> Tensor | None:
        """A buffer.

        None, without ``wait``, if that means to wait for another to come back, and, unless it ``must`` be, if none can come.
        """
        if not self._free and self.made < self.most:
            self._make(must and not self._busy)
        if not self._free and self._busy and wait:
            self._land()
        if not self._free:
            assert not must, "all buffers are in use"
            return None
        return self._free.pop()

    def give(self, buffer: Tensor, wait: Callable[[], None] | None = None) -> None:
        if buffer.nbytes < self.nbytes:
            if wait is not None:
                wait()
            self._drop(buffer.nbytes)
        elif wait is None:
            self._free.append(buffer)
        else:
            self._busy.append((buffer, wait))

    def land_all(self) -> None:
        """Wait for all that were given back."""
        while self._busy:
            self._land()

    def _land(self) -> None:
        buffer, wait = self._busy.popleft()
        wait()
        self._free.append(buffer)

    def _make(self, must: bool) -> None:
        made = self.memory.get(self.nbytes, must)
        if made is not None:
            self.made += 1
            self._free.append(made)

    def _drop(self, nbytes: int) -> None:
        self.memory.give(nbytes)
        self.made -= 1
