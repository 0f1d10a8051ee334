"""The time on this rank's device, in seconds of the host's clock, and how that clock differs from another rank's.

CUDA runs behind the host, so a clock of the host would tell when work is *asked* for.  Waiting for the device before each
reading would be right, and would change what is measured: the host could no longer run ahead.  So moments on a GPU are events in its
stream.  They cost a few microseconds, and are read after the run; one event per step, which the host waits for, says when
on the host's clock the others were.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

now = time.perf_counter


class Clock(Protocol):
    def mark(self) -> Any:
        """This moment."""
        ...

    def seconds(self, mark: Any) -> float:
        """When ``mark`` was, on the clock of the host; asked after the run."""
        ...


class HostClock:
    """For work that is done when the call returns."""

    def mark(self) -> float:
        return now()

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """For work in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._at = now()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._at + self._anchor.elapsed_time(mark) / 1000


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def offset_to_first_rank(rounds: int = 8) -> float:
    """What to add to this rank's clock to read that of rank 0.  Every rank of the job calls it.

    A rank asks rank 0 for the time; the answer is as old as half of the round trip, more or less.  Of several the quickest is
    taken: it is wrong by half of its round trip at the most, and if no difference at all is as likely, there is none.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            for _ in range(rounds):
                dist.recv(answer, other)
                dist.send(answer.fill_(now()), other)
        return 0.0
    trips = []
    for _ in range(rounds):
        asked = now()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        heard = now()
        trips.append((heard - asked, answer.item() - (asked + heard) / 2))
    trip, offset = min(trips)
    return offset if abs(offset) > trip / 2 else 0.0  # ranks of one machine read the same clock
