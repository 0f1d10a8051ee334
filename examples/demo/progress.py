"""What the person at the terminal sees and does while a training runs."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from types import FrameType, TracebackType

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """A progress bar on a terminal; elsewhere (a log file, a pipe) a line every few seconds.

    Without ``active`` it shows nothing: only one rank should talk.
    """

    def __init__(self, first: int, total: int, *, active: bool) -> None:
        self._bar = self._next_line = None
        if active and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns  # unlike tqdm's own, never 0
            self._bar = tqdm(total=total, initial=first, unit="step", ncols=min(width, 110))
        elif active:
            self._next_line = 0.0

    def update(self, step: int, total: int, loss: float) -> None:
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(f"train loss {loss:.3f}", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._next_line is not None and (time.monotonic() >= self._next_line or step == total):
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"step {step:5d}/{total}   train loss {loss:.3f}", flush=True)

    def note(self, message: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(message)
        elif self._next_line is not None:
            print(message, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class StopRequest:
    """Within ``with``, Ctrl-C does not interrupt; it sets ``requested``, and the loop ends where it is safe.

    A second Ctrl-C changes nothing here: torchrun passes on the one that the terminal has already sent to
    every process, so it may well be the first.  The launcher kills what does not end in time.
    """

    def __init__(self) -> None:
        self.requested = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
