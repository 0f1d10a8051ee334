"""Which parts of a file are free."""

from __future__ import annotations

import bisect


class Regions:
    """The free parts of a space that grows at its end, as (offset, size) in order, neighbours joined."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def missing(self, nbytes: int) -> int:
        """By how much the space must grow until it has ``nbytes`` in one part."""
        if any(size >= nbytes for _, size in self._free):
            return 0
        last, length = self._free[-1] if self._free else (self.size, 0)
        return nbytes - length if last + length == self.size else nbytes

    def grow(self, nbytes: int) -> None:
        """The space has become larger."""
        self.size += nbytes
        self.give(self.size - nbytes, nbytes)

    def take(self, nbytes: int) -> int:
        """The offset of a part that was free; ``missing`` has said that there is one."""
        for index, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        raise AssertionError(f"no free part of {nbytes} bytes")

    def give(self, offset: int, nbytes: int) -> None:
        """This part is free again."""
        if not nbytes:
            return
        index = bisect.bisect(self._free, (offset, nbytes))
        start, stop = offset, offset + nbytes
        if index < len(self._free) and self._free[index][0] == stop:
            stop += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop - start))
