"""The messages between the launcher and a node agent: one line each, in both directions.

Down: first the job as one line of JSON, then the orders of ``Order``.  Up: a greeting, then frames, each a
letter for its kind followed by its text.  The greeting lets the launcher tell frames from what a login shell
may print before the agent runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

GREETING = b"colossalai node agent"
OUT, ERR, REPORT = b"o", b"e", b"r"


class Order(Enum):
    """An order of the launcher to an agent, after the job itself."""

    PROBE = "probe"
    """See whether the master's port can be reached from your host."""
    GO = "go"
    """All hosts are ready: start the ranks."""
    STOP = "stop"
    """Pass the signal whose number follows to the ranks, and kill what is left after the grace period."""
    KILL = "kill"
    """Kill everything now."""


class AgentEvent(Enum):
    """A report of an agent."""

    READY = "ready"
    """The script, the working directory and the port are fine."""
    REACHED = "reached"
    """The master's port can be reached from here."""
    REFUSED = "refused"
    """The job cannot start here; ``message`` says why."""
    DONE = "done"
    """No process is left here; ``failures`` and ``message`` say how it went."""


def frame(kind: bytes, text: bytes) -> bytes:
    return kind + text + b"\n"


def report(event: AgentEvent, **fields: Any) -> bytes:
    return frame(REPORT, json.dumps({"event": event.value, **fields}).encode())


class LineBuffer:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        yield from lines
