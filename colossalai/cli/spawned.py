"""Around processes that a command starts on this machine: what they see, and how far they are."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm


@contextlib.contextmanager
def gpus_hidden(device: str) -> Iterator[None]:
    """With ``cpu``, processes that are started here see no GPU: layers would choose it."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if device == "cpu":
        os.environ[name] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif device == "cpu":
            del os.environ[name]


@contextlib.contextmanager
def progress(ticks: Path, steps: int, every: float = 0.2) -> Iterator[None]:
    """A bar over the steps that rank 0 has noted in ``ticks``; nothing where no terminal is."""
    if not sys.stderr.isatty():
        yield
        return
    bar, done = tqdm(total=steps, unit="step", leave=False), threading.Event()

    def follow() -> None:
        while not done.wait(every):
            bar.n = ticks.stat().st_size
            bar.refresh()

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        bar.close()
