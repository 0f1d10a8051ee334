"""Finding and ending every process below this one (Linux; elsewhere torchrun's own cleaning must do)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child instead of init's, so none gets away."""
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """The living processes below ``root``, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # after the command's name, which is in parentheses and may hold anything: state, parent
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def kill_descendants(root: int, timeout: float = 5.0) -> list[int]:
    """Kill until none is left, since a dying process may have started another; the unkillable are returned."""
    deadline = time.monotonic() + timeout
    while (left := descendants(root)) and time.monotonic() < deadline:
        kill(left)
        reap()
        time.sleep(0.02)
    return left


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(keep: int | None = None) -> None:
    """Collect adopted children that have ended, so that no zombies pile up; ``keep`` has its own waiter."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == keep:
                return
            os.waitpid(ended.si_pid, 0)
