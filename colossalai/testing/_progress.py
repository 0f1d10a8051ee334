"""Whether ranks get on: a script may take as long as it likes, but one that is stuck must be noticed.

A rank gets on while it prints, or while it, or a process that it has started, uses the CPU.  Waiting for a
message or a lock uses none; waiting for CUDA does, so where CUDA is in use its code must also be at another
place, or have allocated memory.  A loop that computes for ever is not told from a long computation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

# The part of the time between two looks in which a rank that gets on uses the CPU.  Polling once in 10 ms
# takes half of it; a rank on a machine with 50 busy processes for each core gets twice as much.
_BUSY = 0.01
_LOOKS = 6  # in the time without progress that is allowed


@dataclass(frozen=True)
class Pulse:
    """How much CPU time a rank has used, and where its code is; the latter only where the former does not
    tell.
    """

    when: float
    cpu: float
    place: int | None

    @classmethod
    def take(cls) -> Pulse:
        place = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            allocations = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
            place = hash((_stacks(), allocations))
        return cls(time.monotonic(), _cpu_seconds(), place)

    def shows_progress_since(self, before: Pulse) -> bool:
        is_busy = self.cpu - before.cpu > _BUSY * (self.when - before.when)
        return is_busy and (self.place is None or self.place != before.place)


def _cpu_seconds() -> float:
    """The CPU time of this process and of those that it has started, such as the workers of a data loader."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    session, tick = os.getsid(0), os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*/stat"):  # none but on Linux
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and int(entry.parent.name) != os.getpid():
                total += (int(fields[11]) + int(fields[12])) / tick
    return total


def _stacks() -> tuple[tuple[str, int, int], ...]:
    """Where every other thread of this process is, down to the instruction."""
    found = []
    for thread, frame in sys._current_frames().items():
        while frame is not None and thread != threading.get_ident():
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))
            frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class Watched(Protocol):
    """A rank as its parent sees it."""

    pulse: Pulse | None
    last_output: float

    @property
    def is_done(self) -> bool: ...

    def ask_pulse(self) -> None: ...


class Progress:
    """Says when no rank has got on for ``timeout`` seconds."""

    def __init__(self, ranks: Sequence[Watched], timeout: float) -> None:
        self._ranks = ranks
        self._last: dict[int, Pulse] = {}
        self._timeout = timeout
        self._pause = timeout / _LOOKS
        # a pulse also counts what was done since the one before it
        self._patience = timeout - self._pause
        self._deadline = time.monotonic() + timeout
        self.next_look = time.monotonic() + self._pause

    def has_stopped(self) -> bool:
        """Look at the ranks, if it is time to, and say whether to give up."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        for i, rank in enumerate(self._ranks):
            if rank.is_done:
                continue
            self._deadline = max(self._deadline, rank.last_output + self._timeout)
            if rank.pulse is None:
                continue
            if i not in self._last or rank.pulse.shows_progress_since(self._last[i]):
                self._deadline = max(self._deadline, rank.pulse.when + self._patience)
            self._last[i] = rank.pulse
            rank.pulse = None
        for rank in self._ranks:
            if not rank.is_done:
                rank.ask_pulse()
        self.next_look = min(now + self._pause, max(self._deadline, now))
        return now >= self._deadline
