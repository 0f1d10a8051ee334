"""The processes of a service's ranks, seen from the service: started together, watched, and ended
together.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from colossalai.serving.errors import StartError
from colossalai.serving.wire import Channel, Frame, WireError, pack_frame
from colossalai.serving.worker import SNAPSHOT, STACKS, STOP, Job, Post, run_worker
from colossalai.utils.local_ranks import fork_server, local_store

_REMOTE_START = 600.0  # seconds in which the ranks of other nodes must report


@dataclass(frozen=True)
class RankMessage:
    rank: int
    kind: str
    value: Any


@dataclass(frozen=True)
class Died:
    rank: int
    how: str


class Ranks:
    """The ranks of ``job`` of this node; on the first node, the connections to all of them.

    What ranks say, and that one died, goes to ``report`` from threads of this object.
    """

    def __init__(self, job: Job, report: Callable[[RankMessage | Died], None]) -> None:
        self.job = job
        self._report = report
        self._channels: dict[int, Channel] = {}
        self._outboxes: dict[int, queue.SimpleQueue[Frame | None]] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._lifelines: list[connection.Connection] = []
        self._store: Any = None
        self._ending = False
        self._starting, self._reaping = threading.Lock(), threading.Lock()
        self._stacks: dict[int, str] = {}

    def start(self) -> None:
        """Start all processes; returns before they are ready."""
        with self._starting:
            self._start()
        threading.Thread(target=self._watch_processes, name="ranks", daemon=True).start()

    def _start(self) -> None:
        context = fork_server()
        host, port = self._host_store()
        listener = self._listen() if self.job.nodes > 1 and self.job.node_rank == 0 else None
        try:
            for rank in self.job.local_ranks:
                if self._ending:
                    raise StartError("the service was shut down")
                self._start_one(context, Post(rank, self.job, host, port, dict(os.environ)))
            if listener is not None:
                self._accept_others(listener)
        except BaseException:
            self._kill()
            raise
        finally:
            if listener is not None:
                listener.close()

    def _host_store(self) -> tuple[str, int]:
        job = self.job
        if job.node_rank != 0:
            return job.host, job.port
        loopback = job.nodes == 1
        host = "127.0.0.1" if loopback else job.host
        try:
            self._store = local_store(300.0, job.port, host)
        except OSError as error:
            raise StartError(
                f"the ranks cannot meet at {host}:{job.port}: {error.strerror or error}; choose another port,"
                " or 0 for one of the system's choice"
            ) from error
        return host, self._store.port

    def _listen(self) -> socket.socket:
        try:
            return socket.create_server((self.job.host, self.job.control_port), backlog=self.job.ranks)
        except OSError as error:
            raise StartError(
                f"the service cannot listen for the ranks of other nodes at {self.job.host}:"
                f"{self.job.control_port}: {error.strerror or error}"
            ) from error

    def _start_one(self, context: Any, post: Post) -> None:
        lifeline, ours = context.Pipe(duplex=False)
        self._lifelines.append(ours)
        end = None
        if self.job.node_rank == 0:
            own, end = socket.socketpair()
            self._add(post.rank, Channel(own))
        process = context.Process(target=run_worker, args=(end, lifeline, post), name=f"rank {post.rank}")
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of these
            raise StartError(
                f"what the ranks shall run cannot be given to them ({error}); name functions and classes that"
                " stand in a module, and arguments that can be pickled"
            ) from error
        finally:
            lifeline.close()
            if end is not None:
                end.close()
        self._processes[post.rank] = process

    def _accept_others(self, listener: socket.socket) -> None:
        """Connect with the ranks of the other nodes; who does not know the secret is turned away."""
        deadline = time.monotonic() + _REMOTE_START
        missing = set(range(self.job.ranks)) - set(self._channels)
        listener.settimeout(0.5)
        while missing and not self._ending:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                raise StartError(
                    f"ranks {sorted(missing)} of other nodes did not report within {_REMOTE_START:g} s"
                ) from None
            channel = Channel(sock)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                channel.authenticate(self.job.secret, accepts=True)
                message = channel.receive(limit=1 << 12)
                if message is None or message[0] != "rank" or message[1] not in missing:
                    raise WireError(f"it introduced itself as {message!r}")
            except WireError:
                channel.close()
                continue
            missing.discard(message[1])
            self._add(message[1], channel)

    def _add(self, rank: int, channel: Channel) -> None:
        self._channels[rank] = channel
        self._outboxes[rank] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, args=(rank, channel), name=f"rank {rank}", daemon=True).start()

    def send(self, frame: Frame, rank: int | None = None) -> None:
        """Have a message sent to a rank, or to all; never waits, even if a rank does not read."""
        for outbox in list(self._outboxes.values()) if rank is None else [self._outboxes[rank]]:
            outbox.put(frame)

    def _write(self, rank: int, channel: Channel) -> None:
        outbox, going = self._outboxes[rank], True
        with contextlib.suppress(OSError):
            while going:
                # all that is there at once: after each call of the system this thread waits for its turn
                # behind the one that answers clients
                found = [outbox.get(), *(outbox.get_nowait() for _ in range(outbox.qsize()))]
                frames = list(itertools.takewhile(lambda frame: frame is not None, found))
                going = len(frames) == len(found)
                channel.send_frame(*(frame for frame in frames if frame is not None))

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            while (message := channel.receive()) is not None:
                kind, value = message
                if kind == STACKS:
                    self._stacks[rank] = str(value)
                else:
                    self._report(RankMessage(rank, kind, value))
        except (OSError, WireError) as error:
            self._lost(rank, str(error))
            return
        self._lost(rank, "its connection was closed")

    def _lost(self, rank: int, how: str) -> None:
        process = self._processes.get(rank)
        if self._ending:
            return
        if process is not None and (code := self._exit_code(process, 1.0)) is not None:
            how = describe_exit(code)  # that says more than that its socket is closed
        self._report(Died(rank, how))

    def _exit_code(self, process: BaseProcess, seconds: float) -> int | None:
        """How ``process`` ended, once it has.  It may be asked for once at a time only."""
        connection.wait([process.sentinel], timeout=seconds)
        with self._reaping:
            process.join(0)
            return process.exitcode

    def _watch_processes(self) -> None:
        """Report a process whose end no socket tells: a rank of a node without the service."""
        sentinels = {p.sentinel: rank for rank, p in self._processes.items() if rank not in self._channels}
        while sentinels and not self._ending:
            for found in connection.wait(list(sentinels), timeout=1.0):
                rank = sentinels.pop(found)  # type: ignore[arg-type]
                if not self._ending:
                    self._report(Died(rank, describe_exit(self._exit_code(self._processes[rank], 1.0))))

    def where_they_are(self, seconds: float = 2.0) -> str:
        """The stack of every rank that answers within ``seconds``."""
        self._stacks = {}
        self.send(pack_frame(SNAPSHOT))
        deadline = time.monotonic() + seconds
        while len(self._stacks) < len(self._channels) and time.monotonic() < deadline:
            time.sleep(0.02)
        mute = [rank for rank in list(self._channels) if rank not in self._stacks]
        texts = [self._stacks[rank] for rank in sorted(self._stacks)]
        texts += [
            f"rank {rank} does not answer: it is stopped, or a call into C never returns" for rank in mute
        ]
        return "\n".join(texts)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: p.pid for rank, p in list(self._processes.items()) if p.pid is not None}

    def wait_all(self) -> None:
        for process in self._processes.values():
            while self._exit_code(process, 1.0) is None:
                pass

    def stop(self, seconds: float) -> None:
        """Ask all ranks to end, and kill those that have not within ``seconds``."""
        self._ending = True
        self.send(pack_frame(STOP))
        deadline = time.monotonic() + seconds
        for process in list(self._processes.values()):
            self._exit_code(process, max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every process of this node, and what they started, and give everything back."""
        self._ending = True
        with self._starting:  # a start that is under way sees that it is to end
            self._kill()

    def _kill(self) -> None:
        self._ending = True
        for process in self._processes.values():
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        for process in self._processes.values():
            self._exit_code(process, 10.0)
        for lifeline in self._lifelines:
            lifeline.close()
        for outbox in self._outboxes.values():
            outbox.put(None)
        for channel in self._channels.values():
            channel.close()
        self._store = None


def describe_exit(code: int | None) -> str:
    if code is None:
        return "its connection was closed"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    more = "; often the system is short of memory (see `dmesg`)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{more}"
