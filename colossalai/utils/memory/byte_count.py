"""``ByteCount``: the bytes in use in a memory tier or on a disk, and the limit that they must keep."""

from __future__ import annotations

import threading


class ByteCount:
    """Counts the bytes in use at a place, up to its ``capacity`` (None: any number); any thread may call."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used = self.peak = 0
        self._lock = threading.Lock()

    def fits(self, nbytes: int) -> bool:
        return self.capacity is None or self.used + nbytes <= self.capacity

    def take(self, nbytes: int) -> bool:
        """Count ``nbytes`` more (or fewer: negative); return False, and count nothing, if they do not fit."""
        with self._lock:
            if nbytes > 0 and not self.fits(nbytes):
                return False
            self.used += nbytes
            self.peak = max(self.peak, self.used)
        assert self.used >= 0, "more bytes were given back than were taken"
        return True
