"""The parent's end of one rank: its process, its outcome, its output and the way to end it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext

from colossalai.testing._progress import Pulse
from colossalai.testing._rank import (
    DUMP_SIGNAL,
    PULSE,
    SNAPSHOT,
    Assignment,
    Message,
    Pipes,
    Raised,
    Returned,
    run_rank,
)
from colossalai.utils.watchdog import RankSnapshot

_TAIL = 40  # lines of output that are repeated when a rank dies or does not answer


class RankHandle:
    def __init__(self, context: ForkServerContext, assignment: Assignment) -> None:
        self.rank = assignment.rank
        self.outcome: Returned | Raised | None = None
        self.snapshot: RankSnapshot | None = None
        self.pulse: Pulse | None = None
        self.last_output = float("-inf")
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self._control, control = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        stdout, child_stdout = context.Pipe(duplex=False)
        stderr, child_stderr = context.Pipe(duplex=False)
        self._outputs = [_Output(self, "stdout", stdout), _Output(self, "stderr", stderr)]
        pipes = Pipes(control, lifeline, child_stdout, child_stderr)
        # Not daemonic: a daemon may not have children, and a DataLoader wants workers.
        self._process = context.Process(
            target=run_rank, args=(pipes, assignment), name=f"rank {self.rank}", daemon=False
        )
        self._alive = self._listening = False
        self._ends = (control, lifeline, child_stdout, child_stderr)

    def start(self) -> None:
        """Start the rank.

        Not done by the constructor: an interrupt that comes when the rank runs, but before its handle is
        known to those who end it, would leave the rank behind.
        """
        self._process.start()
        self._alive = self._listening = True
        for end in self._ends:
            end.close()

    @property
    def failure(self) -> Raised:
        assert isinstance(self.outcome, Raised)
        return self.outcome

    def ask(self) -> None:
        """Request a snapshot; it arrives through ``pump``."""
        self.snapshot = None
        with contextlib.suppress(OSError):
            self._control.send(SNAPSHOT)

    def ask_pulse(self) -> None:
        """Request a pulse, which arrives in the same way."""
        with contextlib.suppress(OSError):
            self._control.send(PULSE)

    @property
    def is_done(self) -> bool:
        return self.outcome is not None

    def dump(self) -> None:
        """Have the stacks written to the rank's stderr, which works even while it cannot answer."""
        if self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, DUMP_SIGNAL)

    @property
    def answering(self) -> bool:
        return self._alive and self.snapshot is None

    def kill(self) -> None:
        """Kill the rank and the processes it started, also those that it left when it died."""
        if self._process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()  # it may not have its own group yet

    def close(self) -> None:
        """Take what is left of the output and give everything back; the rank has been killed."""
        if self._process.pid is not None:
            self._process.join()
        for end in self._ends:  # those of a rank that was not started, or whose start was interrupted
            end.close()
        for output in self._outputs:
            output.drain()
            output.connection.close()
        self._control.close()
        self._lifeline.close()  # a rank of which we have no number ends by this
        self._process.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def sources(self) -> dict[Connection | int, Callable[[], None]]:
        """What may become readable, each with what to do then."""
        found: dict[Connection | int, Callable[[], None]] = {
            output.connection: output.read for output in self._outputs if output.open
        }
        if self._alive:
            # Death is told by the fork server: processes that the rank forked may hold its pipes open.
            found[self._process.sentinel] = self._died
            if self._listening:
                found[self._control] = self._receive
        return found

    def _receive(self) -> None:
        try:
            self._take(self._control.recv())
        except (EOFError, OSError):
            self._listening = False

    def _take(self, message: Message) -> None:
        if isinstance(message, RankSnapshot):
            self.snapshot = message
        elif isinstance(message, Pulse):
            self.pulse = message
        else:
            self.outcome = message

    def _died(self) -> None:
        if not self._alive:
            return
        self._alive = False
        self._process.join()
        with contextlib.suppress(EOFError, OSError):  # the end of what it has said
            while self._control.poll():
                self._take(self._control.recv())
        for output in self._outputs:
            output.drain()
        if self.outcome is None:
            self.outcome = Raised(
                classes=((ChildProcessError.__module__, ChildProcessError.__qualname__),),
                headline=f"died with exit code {_exit_code(self._process.exitcode)}",
                traceback="\n".join(self.tail),
                echo=False,
                when=time.monotonic(),
            )


class _Output:
    """One stream of a rank, passed on line by line with the rank in front."""

    def __init__(self, owner: RankHandle, name: str, connection: Connection) -> None:
        self.connection = connection
        self.open = True
        self._owner = owner
        self._name = name
        self._rest = b""

    def read(self) -> None:
        data = os.read(self.connection.fileno(), 1 << 16)
        self.open = bool(data)
        if data:
            self._owner.last_output = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._forward(lines)

    def drain(self) -> None:
        """Read what is there now.

        The bound is for a process that escaped from the rank and writes forever.
        """
        for _ in range(256):
            if not (self.open and self.connection.poll()):
                break
            self.read()
        if self._rest:
            self._forward([self._rest])
            self._rest = b""

    def _forward(self, lines: list[bytes]) -> None:
        stream = getattr(sys, self._name)
        for line in lines:
            text = line.decode(errors="replace")
            self._owner.tail.append(text)
            stream.write(f"[rank {self._owner.rank}] {text}\n")


def _exit_code(code: int | None) -> str:
    if code is not None and -code in {s.value for s in signal.Signals}:
        return f"{code} ({signal.Signals(-code).name})"
    return str(code)


def pump(ranks: Sequence[RankHandle], seconds: float) -> None:
    """Wait until something comes from a rank, at most ``seconds``, and take it in."""
    sources = {source: action for rank in ranks for source, action in rank.sources().items()}
    for ready in wait(list(sources), max(0.0, seconds)):
        sources[ready]()  # type: ignore[index]


def ask_all(ranks: Sequence[RankHandle], seconds: float) -> dict[int, RankSnapshot | None]:
    """What each rank is doing; None for a rank that is dead or does not answer within ``seconds``."""
    for rank in ranks:
        rank.ask()
    deadline = time.monotonic() + seconds
    while any(rank.answering for rank in ranks) and time.monotonic() < deadline:
        pump(ranks, deadline - time.monotonic())
    return {rank.rank: rank.snapshot for rank in ranks}
