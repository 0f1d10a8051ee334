"""What benchmarks need on a GPU that is lent for minutes: to take turns there, and to end in time."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def turn() -> Iterator[None]:
    """The GPU alone, among processes that have one file in the environment variable ``TURNS``: so some may
    compile while one is timed.  ``flock $TURNS COMMAND`` gives a turn to any other command.
    """
    if not (path := os.environ.get("TURNS")):
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def end_after(seconds: float | None, last: Callable[[], None] = lambda: None) -> None:
    """After so many seconds the process calls ``last``, says that its time is over, and ends, whatever it is
    doing.
    """
    if seconds is None:
        return

    def end() -> None:
        try:
            last()
            print(f"ended after its {seconds:g} s", flush=True)
        finally:
            sys.stderr.flush()
            os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
