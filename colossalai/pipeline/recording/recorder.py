"""``record_run``: every rank notes when its actions start and end; the first rank gets the notes of all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from colossalai.mesh import PIPELINE_AXIS, Mesh
from colossalai.pipeline.recording.recording import Note, Recording
from colossalai.pipeline.schedule.base import Action, Timetable

# The time on this rank's device, in seconds of the host's clock, and how that clock differs from another
# rank's.
#
# CUDA runs behind the host, so a clock of the host would tell when work is *asked* for. Waiting for the
# device before each reading would be right, and would change what is measured: the host could no longer run
# ahead. So moments on a GPU are events in its stream. They cost a few microseconds, and are read after the
# run; one event per step, which the host waits for, says when on the host's clock the others were.

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

    A rank asks rank 0 for the time; the answer is as old as half of the round trip, more or less.  Of several
    the quickest is taken: it is wrong by half of its round trip at the most, and if no difference at all is
    as likely, there is none.
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


class StepRecorder:
    """Notes the actions of this rank in one step."""

    def __init__(self, timetable: Timetable, mesh: Mesh, clock: Clock) -> None:
        self._timetable, self._clock = timetable, clock
        others = {
            axis: mesh.coord[axis] for axis in mesh.axes if axis != PIPELINE_AXIS and mesh.size[axis] > 1
        }
        self._pipeline = ", ".join(f"{axis} {coord}" for axis, coord in others.items())
        self._rank = mesh.coord.get(PIPELINE_AXIS, 0)
        self._marks: list[tuple[Action, Any, Any]] = []

    def mark(self) -> Any:
        return self._clock.mark()

    def record(self, action: Action, start: Any, end: Any) -> None:
        self._marks.append((action, start, end))

    def note(self, offset: float) -> Note:
        """What is to be known about this rank's step, on a clock that is ``offset`` ahead."""
        read = self._clock.seconds
        spans = tuple(
            (action, read(start) + offset, read(end) + offset) for action, start, end in self._marks
        )
        return Note(self._timetable, self._pipeline, self._rank, spans)


@dataclass
class _Active:
    steps: list[StepRecorder] = field(default_factory=list)


# The recording that goes on in this process: like a profiler, it sees every step that is run.
_active: _Active | None = None


def step_recorder(timetable: Timetable, mesh: Mesh, device: torch.device) -> StepRecorder | None:
    """Return the recorder of the step that begins now; None if nothing is recorded."""
    if _active is None:
        return None
    _active.steps.append(StepRecorder(timetable, mesh, clock_of(device)))
    return _active.steps[-1]


@contextmanager
def record_run() -> Iterator[Recording]:
    """Record every step of a pipeline inside of ``with record_run() as recording:``, on every rank of the
    job.

    The recording can be read after the block.  It is on rank 0; on the other ranks its methods do nothing.
    """
    global _active
    if _active is not None:
        raise RuntimeError("record_run is active already; end it before another begins")
    active = _active = _Active()
    recording = Recording()
    try:
        yield recording
    finally:
        _active = None
    if not active.steps:
        raise RuntimeError(
            "record_run saw no step of a pipeline; call engine.execute_schedule or booster.execute_pipeline"
            " inside of it, in a job with a pipeline"
        )
    offset = offset_to_first_rank()
    recording.read(_gathered([step.note(offset) for step in active.steps]))


def _gathered(own: list[Note]) -> list[list[Note]]:
    """The notes of all ranks on rank 0, nothing on the others."""
    if not dist.is_initialized():
        return [own]
    is_first = dist.get_rank() == 0
    found: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(own, found)
    return found or []
