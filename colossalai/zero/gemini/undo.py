"""What a chunk was before an update: its weights and optimizer states, to go back to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel.kept import Kept
from colossalai.zero.gemini.state_kinds import is_large
from colossalai.zero.gemini.tiers import OutOfCapacity, Tier


class UndoBuffers:
    """Buffers of ``most`` bytes in all, in the memory of ``tier``, as long as ``room()`` has so many; used again and again.

    One thread gets them, any may put them back.
    """

    def __init__(self, tier: Tier, most: int, room: Callable[[], int]) -> None:
        self.tier, self.most, self.room = tier, most, room
        self.made = 0  # bytes
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def get(self, nbytes: int) -> Tensor | None:
        """A buffer of at least ``nbytes``; None if there is none left."""
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
        if nbytes > self.room():
            return None
        with self._lock:
            if self.made + nbytes > self.most:
                return None
            self.made += nbytes
        try:
            self.tier.take(nbytes, "what updates in the backward pass may have to go back to")
        except OutOfCapacity:  # an update took the room meanwhile
            with self._lock:
                self.made -= nbytes
            return None
        return torch.empty(nbytes, dtype=torch.uint8)  # only the CPU touches it: not page-locked

    def put(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Somebody needs the memory: give back what is not in use."""
        with self._lock:
            free, self._free = self._free, []
            self.made -= sum(buffer.nbytes for buffer in free)
        for buffer in free:
            self.tier.give(buffer.nbytes)


class Undo:
    """Memory in ``buffer`` for what ``tensors`` and the entries of ``states`` are before an update, which writes the copies (``kept``)."""

    def __init__(
        self, buffer: Tensor, tensors: Sequence[Tensor], states: Iterable[MutableMapping[str, Any]]
    ) -> None:
        self._entries = [(state, dict(state)) for state in states]
        held = [v for _, entries in self._entries for v in entries.values() if torch.is_tensor(v)]
        self.kept = Kept(buffer, (*tensors, *held))
        self.kept.copy([tensor for tensor in held if not is_large(tensor)])  # counters of steps go up first

    def restore(self) -> None:
        """Write everything back."""
        self.kept.restore()
        for state, entries in self._entries:
            state.clear()
            state.update(entries)
