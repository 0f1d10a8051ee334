"""What those who start ranks on this machine need: a store that the parent hosts, the variables of a rank,
and a process that ends with its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

# For the resolver of the C library; see [Note: no name server].
IMPATIENT = "timeout:1 attempts:1"


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def fork_server() -> ForkServerContext:
    """Start the server once; it imports what this process has imported of ours and what is slow, so that no
    rank has to.
    """
    context = multiprocessing.get_context("forkserver")
    roots = ("colossalai", "titans", "pytest", "transformers")
    ours = sorted(name for name in sys.modules if name.partition(".")[0] in roots)
    context.set_forkserver_preload(["colossalai.utils._forkserver_preload", *ours])
    # The server of Python < 3.13 ignores our sys.path, and a preload that fails is silent and slow.
    with changed_environment(PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path)):
        multiprocessing.forkserver.ensure_running()
    return context


def local_store(timeout: float, port: int = 0, host: str = "127.0.0.1") -> TCPStore:
    """Host the rendezvous of ranks; port 0 is one of the system's choice.  [Note: no name server]

    A TCPStore asks for the host name of every peer, and asks the name server when it sees the loopback
    address in its IPv6 form; an answer that got lost stops all ranks for five seconds.  So we listen on IPv4,
    and what the clients still ask may take one second.
    """
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    with changed_environment(RES_OPTIONS=IMPATIENT):
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listener.detach(),
        )


@contextlib.contextmanager
def changed_environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def set_rank_environment(
    environment: dict[str, str],
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    host: str,
    port: int,
) -> None:
    """Take the parent's ``environment``, which a process of a fork server lacks, and what torchrun sets."""
    os.environ.clear()
    os.environ["RES_OPTIONS"] = IMPATIENT
    os.environ.update(
        environment,
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(local_world_size),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent hosts the store: rank 0 must not bind the port
    )


def die_with_parent(lifeline: HasDescriptor) -> None:
    """Let the kernel kill this process group when the parent's end of the pipe or socket closes.

    A thread that serves the parent notices as well, but not while a call into C holds the interpreter lock.
    PR_SET_PDEATHSIG would wait for the fork server, which lives as long as its ranks.  Anything that arrives
    raises the signal, so nothing may be sent through ``lifeline``.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # not Linux
        return
    with contextlib.suppress(OSError):  # a sandbox that imitates Linux without this
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
