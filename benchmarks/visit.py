"""What benchmarks need on a GPU that is lent for minutes: to take turns there, and to end in time."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_HELD = threading.local()


@contextmanager
def turn() -> Iterator[None]:
    """The GPU alone, among processes that have one file in the environment variable ``TURNS``: so some may
    plan or compile while one is timed.  ``flock $TURNS COMMAND`` gives a turn to any other command.

    A turn inside of a turn is the same one.  At its end, memory that is only cached goes to the others.
    """
    path = os.environ.get("TURNS")
    if not path or getattr(_HELD, "is_held", False):
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _HELD.is_held = True
        try:
            yield
        finally:
            _HELD.is_held = False
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()


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
