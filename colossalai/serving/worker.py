"""One rank of a service: a process that joins the job, builds its part of the model, and works until it is
told to stop, or until the service is gone.

A thread of its own reads what the service sends, so that a rank that computes, or waits in a collective,
still says where it is, and ends when the service ends.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from colossalai.launchers import launch
from colossalai.serving.wire import Channel
from colossalai.utils.local_ranks import die_with_parent, set_rank_environment
from colossalai.utils.watchdog import explain, take_snapshot

# What a service says to a rank, beside what its program understands.
SNAPSHOT, STOP = "snapshot", "stop"
# What a rank says: it can work; where it stands; why it cannot go on; results; that it lives, with numbers.
READY, STACKS, FAILED, EVENTS, BEAT = "ready", "stacks", "failed", "events", "beat"


class ServiceLink:
    """A rank's connection to its service, as its program sees it."""

    def __init__(self, channel: Channel, rank: int) -> None:
        self.rank = rank
        self.send = channel.send
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def take(self, timeout: float) -> Iterator[tuple[str, Any]]:
        """All messages that are there; waits up to ``timeout`` seconds for the first."""
        try:
            yield self.inbox.get(timeout=timeout) if timeout > 0 else self.inbox.get_nowait()
            while True:
                yield self.inbox.get_nowait()
        except queue.Empty:
            return


class RankProgram(Protocol):
    """What the ranks of a service do: built on each rank after the launch, then run until ``STOP`` comes."""

    def run(self, link: ServiceLink) -> None: ...


@dataclass(frozen=True)
class Job:
    """The ranks of a service and what they run.  It is given to processes by multiprocessing alone."""

    program: Callable[..., RankProgram]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    nodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    """Of the store where the ranks meet; of several nodes, the address of the first."""
    port: int = 0
    """Of that store; 0 is one of the system's choice."""
    control_port: int = 0
    """Where the ranks of other nodes report to the service."""
    secret: bytes = field(default=b"", repr=False)
    backend: str | None = None
    seed: int = 1024

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"a service needs {name} of at least 1, got {value!r}")
        if self.ranks % self.nodes:
            raise ValueError(
                f"tp x pp = {self.tp} x {self.pp} ranks cannot be shared evenly by {self.nodes} nodes"
            )
        if self.node_rank not in range(self.nodes):
            raise ValueError(f"node_rank must be from 0 to {self.nodes - 1}, got {self.node_rank!r}")
        if self.nodes > 1 and len(self.secret) < 16:
            raise ValueError(
                "a service on several nodes needs a secret of at least 16 characters that all of"
                " them know: set"
                " COLOSSALAI_SERVING_SECRET to the same random text on each"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def local_ranks(self) -> range:
        """The ranks of this node."""
        count = self.ranks // self.nodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


@dataclass(frozen=True)
class Post:
    """What one process is told when it starts."""

    rank: int
    job: Job
    host: str
    port: int
    environment: dict[str, str] = field(repr=False)


def run_worker(end: socket.socket | None, lifeline: Connection, post: Post) -> None:
    """The whole life of the process of one rank.

    ``end`` is its end of a socket pair; a rank of another node has none and connects to the first.
    """
    gc.freeze()
    gc.enable()
    os.setsid()  # Ctrl-C is for the service, which then ends us; and our children are killed with us
    die_with_parent(lifeline)
    faulthandler.enable()
    _adopt(post)
    channel = Channel(end if end is not None else _connect(post))
    if end is None:
        channel.authenticate(post.job.secret, accepts=False)
        channel.send("rank", post.rank)
    link = ServiceLink(channel, post.rank)
    threading.Thread(target=_listen, args=(channel, link), name="service", daemon=True).start()
    try:
        _launch(post)
        program = post.job.program(**post.job.arguments)
        gc.collect()
        gc.freeze()  # what stays is not searched for garbage between steps
        link.send(READY)
        program.run(link)
    except BaseException as error:
        # It stays until it is killed: were its sockets closed, the other ranks would fail in turn with errors
        # that say nothing.
        _report(link, error)
        threading.Event().wait()
    os._exit(0)  # what torch and gloo do at the end of an interpreter is of no use to anybody


def _adopt(post: Post) -> None:
    count = len(post.job.local_ranks)
    set_rank_environment(
        post.environment,
        rank=post.rank,
        local_rank=post.rank - post.job.local_ranks.start,
        world_size=post.job.ranks,
        local_world_size=count,
        host=post.host,
        port=post.port,
    )
    multiprocessing.set_start_method(None, force=True)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(
        int(threads) if threads.isdecimal() and int(threads) else max(1, available // count)
    )


def _connect(post: Post) -> socket.socket:
    sock = socket.create_connection((post.job.host, post.job.control_port), timeout=60)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _launch(post: Post) -> None:
    job = post.job
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    parallel = {"tensor": {"size": job.tp, "mode": "1d" if job.tp > 1 else None}, "pipeline": job.pp}
    launch(
        {"parallel": parallel},
        rank=post.rank,
        world_size=job.ranks,
        host=post.host,
        port=post.port,
        backend=job.backend,
        local_rank=post.rank - job.local_ranks.start,
        seed=job.seed,
        verbose=False,
    )


def _listen(channel: Channel, link: ServiceLink) -> None:
    """Read until the service is gone; then this process and its children end."""
    try:
        while (message := channel.receive()) is not None:
            kind, value = message
            if kind == SNAPSHOT:
                channel.send(STACKS, explain({link.rank: take_snapshot(root=__file__)}))
            else:
                link.inbox.put((kind, value))
    finally:
        os.killpg(0, signal.SIGKILL)


def _report(link: ServiceLink, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}".strip().rstrip(":")
    try:
        link.send(FAILED, {"summary": summary, "traceback": text})
    except OSError:
        os._exit(1)
