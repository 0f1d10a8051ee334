"""What a chunk was before an update: copies of its weights and optimizer states, to go back to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel.native.copy import copy_past_cache
from colossalai.zero.gemini.tiers import OutOfCapacity, Tier

ALIGNED = 64  # bytes: where each copy begins


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


class UndoBuffers:
    """At most ``most`` buffers of ``nbytes`` in the memory of ``tier``, as long as ``room()`` has so many bytes; used again and again."""

    def __init__(self, tier: Tier, nbytes: int, most: int, room: Callable[[], int]) -> None:
        self.tier, self.nbytes, self.most, self.room = tier, nbytes, most, room
        self.made = 0
        self._free: list[Tensor] = []
        self._lock = threading.Lock()  # updates give theirs back on a thread of their own

    def get(self) -> Tensor | None:
        """A buffer; None if there is none left."""
        with self._lock:
            if self._free:
                return self._free.pop()
        if self.made >= self.most or self.nbytes > self.room():
            return None
        try:
            self.tier.take(self.nbytes, "what updates in the backward pass may have to go back to")
        except OutOfCapacity:  # an update took the room meanwhile
            return None
        self.made += 1
        return torch.empty(self.nbytes, dtype=torch.uint8)  # only the CPU touches it: not page-locked

    def put(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


class Undo:
    """Copies of ``tensors`` and of the entries of ``states`` in ``buffer``."""

    @torch.no_grad()
    def __init__(
        self, buffer: Tensor, tensors: Iterable[Tensor], states: Iterable[MutableMapping[str, Any]]
    ) -> None:
        self.buffer = buffer
        self._entries = [(state, dict(state)) for state in states]
        found = [
            *tensors,
            *(v for _, entries in self._entries for v in entries.values() if torch.is_tensor(v)),
        ]
        self._now, self._before = [t.detach() for t in found], []
        start = 0
        for tensor in found:
            self._before.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += padded(tensor.nbytes)
        copy_past_cache(self._before, self._now)

    @torch.no_grad()
    def restore(self) -> None:
        """Write everything back."""
        for tensor, before in zip(self._now, self._before, strict=True):
            tensor.copy_(before)
        for state, entries in self._entries:
            state.clear()
            state.update(entries)
