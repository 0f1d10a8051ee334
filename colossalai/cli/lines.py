"""Output of ranks as whole lines, so that several hosts can share one terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

PROGRESS_INTERVAL = 5.0
LONGEST_LINE = 1 << 16


class LineAssembler:
    """Turns chunks of bytes into lines without their end.

    A progress bar rewrites its line with carriage returns.  On a terminal shared by several hosts each rewrite
    would become a line of its own, so of these only the newest is shown, at most every ``PROGRESS_INTERVAL``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rest = b""
        self._next_progress = clock()

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from map(_last_rewrite, lines)
        if b"\r" in self._rest:
            newest = _last_rewrite(self._rest)
            # some bars write the return before the text and some after it; what follows must still fit
            self._rest = newest + b"\r" if self._rest.endswith(b"\r") else b"\r" + newest
            if self._clock() >= self._next_progress:
                self._next_progress = self._clock() + PROGRESS_INTERVAL
                yield newest
        elif len(self._rest) > LONGEST_LINE:
            yield self._rest
            self._rest = b""

    def finish(self) -> Iterator[bytes]:
        """What is left when the stream ends without a newline."""
        if self._rest.strip():
            yield _last_rewrite(self._rest)
        self._rest = b""


def _last_rewrite(line: bytes) -> bytes:
    rewrites = [part for part in line.split(b"\r") if part]
    return rewrites[-1] if rewrites else b""
