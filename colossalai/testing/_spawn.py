"""``spawn``: run a function on several ranks of this machine, quickly and without a rank left behind.

Ranks are forked from a server process that has already imported torch, so 8 of them start in a fraction of a
second, while ``spawn`` of the standard library takes half a minute.  The parent hosts the rendezvous store on
a port the system chose, so no port is guessed, freed and taken by another process in between.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from colossalai.testing._handle import RankHandle, ask_all, pump
from colossalai.testing._progress import Progress
from colossalai.testing._rank import Assignment, Raised, Returned
from colossalai.utils.local_ranks import fork_server, local_store
from colossalai.utils.watchdog import explain

DEFAULT_TIMEOUT = 60.0
_GRACE = 2.0  # how long a lost connection waits for its cause to show up


class RankError(RuntimeError):
    """A rank raised, died or was stuck.

    ``rank`` is the rank that failed first, ``cause_type`` the class of what it raised (``ChildProcessError``
    if it died, ``TimeoutError`` if it was stuck), ``traceback`` its traceback or last output.
    """

    def __init__(self, message: str, *, rank: int, cause_type: type[BaseException], traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause_type = cause_type
        self.traceback = traceback


def spawn(
    func: Callable[..., Any], nprocs: int = 1, *, timeout: float = DEFAULT_TIMEOUT, **kwargs: Any
) -> list[Any]:
    """Call ``func(rank=..., world_size=..., port=..., **kwargs)`` on ``nprocs`` ranks; return their results.

    ``func`` must be a function of a module (or a ``functools.partial`` of one).  When a rank raises or dies,
    or when no rank gets on for ``timeout`` seconds (none uses the CPU or prints: they wait for each other),
    all are killed and ``RankError`` tells which rank, why, and where the others were.  What ranks print
    appears on this process's stdout and stderr.
    """
    __tracebackhide__ = True
    if nprocs < 1:
        raise ValueError(f"spawn needs at least one rank, got nprocs={nprocs}")
    call = _pickled(func, kwargs)
    context = fork_server()
    store = local_store(timeout)
    ranks: list[RankHandle] = []
    try:
        for rank in range(nprocs):
            ranks.append(RankHandle(context, Assignment(rank, nprocs, store.port, call, dict(os.environ))))
            ranks[-1].start()
        return _supervise(ranks, timeout)
    finally:
        for handle in ranks:
            handle.kill()
        for handle in ranks:
            handle.close()


def _pickled(func: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((func, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise TypeError(
            f"spawn cannot send {func!r} with the arguments {sorted(kwargs)} to another process: {error}. "
            "Use a function at the top level of a module, and plain values as arguments"
        ) from error


def _supervise(ranks: list[RankHandle], timeout: float) -> list[Any]:
    __tracebackhide__ = True
    progress = Progress(ranks, timeout)
    patience = float("inf")
    while any(rank.outcome is None for rank in ranks):
        pump(ranks, min(patience, progress.next_look) - time.monotonic())
        failed = [rank for rank in ranks if isinstance(rank.outcome, Raised)]
        if any(not rank.failure.echo for rank in failed):
            break
        if failed:
            patience = min(patience, time.monotonic() + _GRACE)
        if time.monotonic() >= patience or progress.has_stopped():
            break
    if failed := [rank for rank in ranks if isinstance(rank.outcome, Raised)]:
        raise _failure(ranks, min(failed, key=lambda rank: (rank.failure.echo, rank.failure.when)))
    if any(rank.outcome is None for rank in ranks):
        raise _stuck(ranks, timeout)
    return [pickle.loads(rank.outcome.value) for rank in ranks if isinstance(rank.outcome, Returned)]


def _failure(ranks: list[RankHandle], cause: RankHandle) -> RankError:
    failure = cause.failure
    states = ask_all([rank for rank in ranks if not isinstance(rank.outcome, Raised)], seconds=1.0)
    lines = [f"rank {cause.rank} {failure.headline}", "", failure.traceback.rstrip()]
    lines += [
        f"rank {rank.rank} {rank.failure.headline}"
        for rank in ranks
        if rank is not cause and isinstance(rank.outcome, Raised)
    ]
    if states:
        lines.append(explain(states, stacks=False))
    return RankError(
        "\n".join(lines), rank=cause.rank, cause_type=_resolve(failure.classes), traceback=failure.traceback
    )


def _stuck(ranks: list[RankHandle], timeout: float) -> RankError:
    stuck = [rank for rank in ranks if rank.outcome is None]
    states = ask_all(ranks, seconds=2.0)
    mute = [rank for rank in ranks if rank.answering]
    for rank in mute:
        rank.dump()
    deadline = time.monotonic() + 0.5
    while mute and time.monotonic() < deadline:
        pump(ranks, deadline - time.monotonic())
    text = explain(states) + "".join(
        f"\n\nrank {rank.rank}, the end of its output:\n" + "\n".join(rank.tail) for rank in mute
    )
    return RankError(
        f"{len(stuck)} of {len(ranks)} ranks did not finish, and made no progress for {timeout:g} s\n{text}",
        rank=stuck[0].rank,
        cause_type=TimeoutError,
        traceback=text,
    )


def _resolve(classes: tuple[tuple[str, str], ...]) -> type[BaseException]:
    """The class of the exception, or its nearest base that this process has imported."""
    for module, name in classes:
        found = sys.modules.get("__main__" if module == "__mp_main__" else module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return BaseException


# Below the ports that Linux gives to connections by itself (32768 and above): of those, one that is free now
# is soon taken by a connection of another test.
_PORTS = (20000, 32000)


def free_port() -> int:
    """Return a port that is free now.

    Another process may take it before you do: bind port 0 where you can.
    """
    numbers = random.SystemRandom()  # tests that set the same seed must not get the same port
    while True:
        port = numbers.randint(*_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
