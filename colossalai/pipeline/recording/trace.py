"""Steps in the trace event format of Chrome, which Perfetto opens too.

A pipeline is a process of the trace, a rank of it a thread, an action a slice; arrows are the messages
between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colossalai.pipeline.schedule.base import Action, Message, PassKind, RunTimes, Timetable

WORDS = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT_GRAD: "gradients of inputs",
    PassKind.WEIGHT_GRAD: "gradients of weights",
}

Steps = Sequence[tuple[Timetable, Mapping[str, RunTimes]]]


def write_trace(path: str | Path, steps: Steps, unit: str) -> None:
    """Times are in microseconds from the first start; a unit of a plan is shown as a millisecond."""
    scale = 1e6 if unit else 1e3
    start = min(played.start for _, pipelines in steps for played in pipelines.values())
    names = list(steps[0][1])
    events = [event for i, name in enumerate(names) for event in _names(i, name, steps[0][0].placement.ranks)]
    for number, (timetable, pipelines) in enumerate(steps):
        for name, played in pipelines.items():
            writer = _Writer(timetable, names.index(name), number, start, scale)
            events += writer.events(played)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(process: int, pipeline: str, ranks: int) -> Iterator[dict[str, Any]]:
    yield _name("process_name", process, 0, f"pipeline {pipeline}".strip())
    for rank in range(ranks):
        yield _name("thread_name", process, rank, f"rank {rank}")


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


class _Writer:
    def __init__(self, timetable: Timetable, process: int, step: int, start: float, scale: float) -> None:
        self.timetable, self.process, self.step = timetable, process, step
        self.start, self.scale = start, scale

    def events(self, played: RunTimes) -> Iterator[dict[str, Any]]:
        for rank, row in enumerate(played.spans):
            for action, start, end in row:
                yield self._slice(rank, action, start, end)
                if self._is_far(needed := self.timetable.needs(rank, action)):
                    # the end of an arrow is bound to the slice that begins with it
                    yield self._arrow("f", rank, needed, start) | {"bp": "e"}
                if self._is_far(made := self.timetable.makes(rank, action)):
                    yield self._arrow("s", rank, made, end)

    def _slice(self, rank: int, action: Action, start: float, end: float) -> dict[str, Any]:
        args = {
            "step": self.step,
            "micro-batch": action.microbatch,
            "chunk": action.chunk,
            "stage": self.timetable.placement.stage(rank, action.chunk),
        }
        event = self._event("X", rank, start, str(action), WORDS[action.kind])
        return event | {"dur": (end - start) * self.scale, "args": args}

    def _is_far(self, message: Message | None) -> bool:
        rank = self.timetable.placement.rank
        return message is not None and rank(message.source) != rank(message.target)

    def _arrow(self, phase: str, rank: int, message: Message | None, at: float) -> dict[str, Any]:
        assert message is not None
        number = f"{self.process}.{self.step}.{message.source}.{message.target}.{message.microbatch}"
        what = "gradient" if message.is_gradient else "activation"
        return self._event(phase, rank, at, what, "message") | {"id": number}

    def _event(self, phase: str, rank: int, at: float, name: str, category: str) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "cat": category,
            "pid": self.process,
            "tid": rank,
            "ts": (at - self.start) * self.scale,
        }
