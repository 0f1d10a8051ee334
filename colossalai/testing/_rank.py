"""The inside of a rank that ``spawn`` started: it runs the function, answers its parent, and never outlives
it.

A rank does not exit by itself.  Once its function has returned or raised, it says so and waits to be killed,
so the sockets of a failed rank stay open and the other ranks do not fail in turn with "connection closed by
peer".
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from colossalai.testing._progress import Pulse
from colossalai.utils.local_ranks import die_with_parent, set_rank_environment
from colossalai.utils.watchdog import RankSnapshot, take_snapshot

# Dumps the stacks to stderr from a signal handler written in C, which needs no interpreter lock.
DUMP_SIGNAL = signal.SIGUSR2

# A stage of a pipeline also says this when another one has told it why it failed.
_LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|gloo/transport"
    r"|pipeline stage \d+ \(rank",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Assignment:
    """The task of one rank, and the parent's environment, which a process of the fork server lacks."""

    rank: int
    world_size: int
    port: int
    call: bytes  # the pickled function and its keyword arguments
    environment: dict[str, str]


@dataclass(frozen=True)
class Pipes:
    control: Connection  # duplex: requests in; snapshots, pulses and the outcome out
    lifeline: Connection  # carries nothing; its other end is open as long as the parent lives
    stdout: Connection
    stderr: Connection


@dataclass(frozen=True)
class Returned:
    value: bytes


@dataclass(frozen=True)
class Raised:
    """An exception in a form that the parent can read even where it cannot import the class."""

    classes: tuple[tuple[str, str], ...]  # module and name of the class and its bases
    headline: str  # one line: "raised ValueError: ..." or "died with exit code ..."
    traceback: str
    echo: bool  # a lost connection: most likely the failure of another rank
    when: float


Message = Returned | Raised | RankSnapshot | Pulse

# What a parent asks for.
SNAPSHOT, PULSE = "snapshot", "pulse"


def run_rank(pipes: Pipes, assignment: Assignment) -> None:
    gc.freeze()  # what the server has imported stays: to look for garbage in it only copies its pages
    gc.enable()
    os.setsid()  # a group of its own, killed together with the processes that the function starts
    die_with_parent(pipes.lifeline)
    _redirect(pipes)
    rank, world_size = assignment.rank, assignment.world_size
    set_rank_environment(
        assignment.environment,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        host="127.0.0.1",
        port=assignment.port,
    )
    torch.set_num_threads(1)
    # Processes that the function starts, such as the workers of a DataLoader, start as in any other program.
    multiprocessing.set_start_method(None, force=True)
    outcome: list[Returned | Raised] = []
    lock = threading.Lock()
    server = threading.Thread(target=_serve, args=(pipes.control, lock, outcome), daemon=True, name="harness")
    server.start()
    outcome.append(_call(assignment))
    sys.stdout.flush()
    sys.stderr.flush()
    with lock:
        pipes.control.send(outcome[0])
    server.join()


def _serve(control: Connection, lock: threading.Lock, outcome: list[Returned | Raised]) -> None:
    while True:
        try:
            if control.recv() == PULSE:
                pulse = Pulse.take()
                with lock:
                    control.send(pulse)
                continue
            snapshot = take_snapshot(root=__file__)
            with lock:
                control.send(snapshot.leave() if outcome else snapshot)
        except (EOFError, OSError):  # the parent is gone
            os.killpg(0, signal.SIGKILL)


def _redirect(pipes: Pipes) -> None:
    os.dup2(pipes.stdout.fileno(), 1)
    os.dup2(pipes.stderr.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def _call(assignment: Assignment) -> Returned | Raised:
    try:
        func, kwargs = pickle.loads(assignment.call)
        value = func(rank=assignment.rank, world_size=assignment.world_size, port=assignment.port, **kwargs)
        return Returned(pickle.dumps(value))
    except BaseException as error:
        return _describe(error)


def _describe(error: BaseException) -> Raised:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and not error.args:
        text += _locals(trace)
    return Raised(
        classes=tuple((base.__module__, base.__qualname__) for base in type(error).__mro__),
        headline=f"raised {type(error).__name__}: {error}".rstrip(": ").split("\n")[0],
        traceback=text,
        echo=any(_is_lost_connection(e) for e in _chain(error)),
        when=time.monotonic(),
    )


def _locals(trace: TracebackType | None) -> str:
    """The values at a failed ``assert``: in a rank, pytest does not rewrite it to show them."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    values = trace.tb_frame.f_locals if trace is not None else {}
    return "where\n" + "".join(f"    {name} = {_short(value)}\n" for name, value in values.items())


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        text = f"<no repr: {error}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_lost_connection(error: BaseException) -> bool:
    kinds = (ConnectionError, torch.distributed.DistNetworkError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
    )
