"""Ranks that stay alive from case to case, and what became of a case on them.

A pool is made of the processes of ``spawn``.  Tasks and answers travel through the store that the parent
hosts.  After anything but a clean end, its owner closes the pool: what is left in a process group must not
reach the next case.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing._handle import RankHandle, ask_all, pump
from colossalai.testing._rank import Assignment, Raised
from colossalai.testing._spawn import _pickled
from colossalai.utils.local_ranks import fork_server, local_store
from colossalai.utils.watchdog import explain

_PACKAGE = str(Path(colossalai.__file__).parent)
_OURS = str(Path(__file__).parent.parent)  # errors of the test helpers are not refusals
_NOT_REFUSALS = (
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
    NameError,
    UnboundLocalError,
    ZeroDivisionError,
)
# What torch says itself, clearly and on every rank, of what it does not support: no refusal of ours could say
# it better.
_TORCH_REFUSES = (
    # DDP with find_unused_parameters and reentrant checkpoints
    "Expected to mark a variable ready only once",
    "Expected to have finished reduction in the prior iteration",  # DDP without find_unused_parameters
    "could not create a primitive descriptor for the LSTM",  # on a CPU, in fp16, also without any plan
)
_POLL = 0.004
_IDLE = 0.05  # of a processor, which the threads of a rank use that waits for others
_GRACE = 5.0  # how long the other ranks may take to raise as well


@dataclass(frozen=True)
class Task:
    """One function of a text that every rank runs."""

    text: str
    function: str
    folder: str


@dataclass
class RankAnswer:
    """The answer of one rank to a task: its log, and the exception that it raised."""

    log: list[tuple[str, int, Any]] = field(default_factory=list)
    error: str | None = None  # class and message
    refusal: bool = False  # raised by a line of the package, with words of its own
    traceback: str = ""


@dataclass
class TaskResult:
    """The result of a task: the answers of all ranks, None where one is missing, and the reason."""

    answers: list[RankAnswer | None]
    stuck: str = ""  # where the ranks were, if some did not answer
    output: str = ""


class RankPool:
    """``ranks`` processes that run tasks one after another."""

    def __init__(self, ranks: int, prepare: Callable[[], None] | None = None) -> None:
        self.ranks, self.tasks = ranks, 0
        self._store = local_store(86_400.0)
        self._output = io.StringIO()
        context = fork_server()
        call = _pickled(_serve, {"prepare": prepare})
        environment = dict(os.environ)
        self._handles: list[RankHandle] = []
        for rank in range(ranks):
            self._handles.append(
                RankHandle(context, Assignment(rank, ranks, self._store.port, call, environment))
            )
            self._handles[-1].start()

    def run(self, task: Task, limit: float) -> TaskResult:
        """Let every rank do ``task``; stop waiting when none has worked for ``limit`` seconds, or soon after
        one has raised.
        """
        number, self.tasks = self.tasks, self.tasks + 1
        self._output.seek(0)
        self._output.truncate()
        self._store.set(f"task/{number}", pickle.dumps(task))  # type: ignore[arg-type]
        answers: list[RankAnswer | None] = [None] * self.ranks
        watch = _Watch([handle._pid for handle in self._handles], limit)
        while None in answers and watch.patient:
            self._pump(_POLL)
            for rank, answer in enumerate(answers):
                if answer is None and self._store.check([f"answer/{number}/{rank}"]):
                    answers[rank] = found = pickle.loads(self._store.get(f"answer/{number}/{rank}"))
                    if found.error is not None:
                        watch.hurry()
            for handle in self._handles:
                if answers[handle.rank] is None and isinstance(handle.outcome, Raised):
                    failure = handle.failure
                    answers[handle.rank] = RankAnswer(error=failure.headline, traceback=failure.traceback)
                    watch.hurry()
        stuck = self._where() if None in answers else ""
        return TaskResult(answers, stuck, self._output.getvalue()[-4000:])

    def close(self) -> None:
        """End all ranks."""
        for handle in self._handles:
            handle.kill()
        with self._captured():
            for handle in self._handles:
                handle.close()

    def _where(self) -> str:
        with self._captured():
            return explain(ask_all(self._handles, seconds=3.0))

    def _pump(self, seconds: float) -> None:
        with self._captured():
            pump(self._handles, seconds)

    @contextlib.contextmanager
    def _captured(self) -> Any:
        with contextlib.redirect_stdout(self._output), contextlib.redirect_stderr(self._output):
            yield


class _Watch:
    """Decides whether to wait on: ranks that hang use hardly any processor time, ranks on a busy machine
    some.
    """

    def __init__(self, pids: list[int], limit: float) -> None:
        self._pids, self._limit = pids, limit
        self._used, self._seen = self._time(), time.monotonic()
        self._moved, self._end = self._seen, self._seen + 10 * limit

    @property
    def patient(self) -> bool:
        now = time.monotonic()
        if (passed := now - self._seen) > 1.0:
            used = self._time()
            if used - self._used > _IDLE * len(self._pids) * passed:
                self._moved = now
            self._used, self._seen = used, now
        return now < self._moved + self._limit and now < self._end

    def hurry(self) -> None:
        """A rank has raised: the others should soon."""
        self._limit = min(self._limit, _GRACE)
        self._end = min(self._end, time.monotonic() + 4 * _GRACE)

    def _time(self) -> float:
        """The seconds of processor time of all ranks."""
        total = 0.0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total


def _serve(rank: int, world_size: int, port: int, prepare: Callable[[], None] | None) -> None:
    """The life of a rank: do tasks until the parent kills it."""
    if prepare is not None:
        prepare()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(days=1))
    number = 0
    while True:
        store.wait([f"task/{number}"])
        task = pickle.loads(store.get(f"task/{number}"))
        answer = _do(task, rank, world_size, port)
        store.set(f"answer/{number}/{rank}", pickle.dumps(answer))  # type: ignore[arg-type]
        number += 1


def _do(task: Task, rank: int, world_size: int, port: int) -> RankAnswer:
    answer = RankAnswer()

    def log(name: str, step: int, value: Any) -> None:
        answer.log.append((name, step, value))

    try:
        gpc.destroy()
        load_text(task.text)[task.function](rank, world_size, port, task.folder, log)
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
        answer.refusal = _is_refusal(error)
        answer.traceback = traceback.format_exc()
    return answer


def load_text(text: str, name: str = "<case>") -> dict[str, Any]:
    """The functions of a generated text; its lines appear in tracebacks."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "case"}
    exec(compile(text, name, "exec"), space)
    return space


def _is_refusal(error: BaseException) -> bool:
    """Whether a line of this package raised ``error`` on purpose."""
    if any(text in str(error) for text in _TORCH_REFUSES):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, _NOT_REFUSALS):
        return False
    file = trace.tb_frame.f_code.co_filename
    if not file.startswith(_PACKAGE) or file.startswith(_OURS):
        return False
    # an operator of torch that raises below a line of ours has no frame of its own
    return linecache.getline(file, trace.tb_lineno).lstrip().startswith("raise ")
