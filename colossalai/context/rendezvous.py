"""The rendezvous of a job's ranks, with one clear error on every rank when it fails.

Rank 0 (or torchrun's agent) hosts a key-value store at ``host:port``.  Every rank signs in there with what it
was launched with; rank 0 waits for all, compares, and writes the verdict that all ranks act on.  Only then is
a process group made, so a wrong rank, size, host or port ends here, within a stated time, and never as a
hang.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

TIMEOUT_VARIABLE = "COLOSSALAI_RENDEZVOUS_TIMEOUT"
DEFAULT_TIMEOUT = 300.0
# Seconds that rank 0 waits for the others to read its verdict.
FAREWELL = 5.0
# Seconds that opening a store may take at least: it looks addresses up, and a name server may be slow.
PATIENCE = 15.0
AGREED = "agreed: "


class RendezvousError(RuntimeError):
    """The ranks did not come together; the message names the host, the port and what to do."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One meeting of all ranks.  ``plan`` is what must be equal on all of them."""

    rank: int
    world_size: int
    host: str
    port: int
    timeout: float
    plan: str = ""

    def meet(self) -> Store:
        """The store for ``init_process_group``, once all ranks have signed in with the same plan."""
        deadline = time.monotonic() + self.timeout
        # torchrun may start the ranks anew at the same store
        prefix = f"colossalai/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        while True:
            store = self._connect(deadline)
            try:
                name = self.agree(PrefixStore(prefix, store), deadline)
            except dist.DistNetworkError as error:
                # The store went away: its host is leaving an earlier job, or has failed.  Only a new try
                # tells.
                if time.monotonic() >= deadline:
                    raise RendezvousError(f"{self._who} lost the store at {self._where}: {error}") from error
                time.sleep(0.2)
                continue
            store.set_timeout(default_pg_timeout)
            return PrefixStore(f"{prefix}/{name}", store)

    @property
    def _hosts_store(self) -> bool:
        return self.rank == 0 and not _agent_hosts_store(self.port)

    @property
    def _who(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    @property
    def _where(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def _signature(self) -> str:
        return f"world_size={self.world_size}" + (f", {self.plan}" if self.plan else "")

    def _connect(self, deadline: float) -> TCPStore:
        if self._hosts_store:
            store = self._open_store("localhost", deadline)
            try:
                self._wait_for_listener(deadline)  # as the others will: the host may be another machine
            except RendezvousError:
                del store  # the traceback holds this frame: the port would stay in use
                raise
            return store
        self._wait_for_listener(deadline)
        return self._open_store(self.host, deadline)

    def _open_store(self, host: str, deadline: float) -> TCPStore:
        # A client that meets the port of another program waits for its answer for ever, whatever timeout it
        # is given, so the constructor runs in a thread that can be left behind.
        result: queue.Queue[TCPStore | Exception] = queue.Queue()
        threading.Thread(target=self._construct_store, args=(host, result), daemon=True).start()
        remaining = deadline - time.monotonic()
        try:
            opened = result.get(timeout=max(PATIENCE if self._hosts_store else 0.1, remaining))
        except queue.Empty:
            raise RendezvousError(
                f"{self._who}: {self._where} is open but did not answer as a rendezvous store within "
                f"{self.timeout:g} s; another program uses this port: choose another port, on all ranks"
            ) from None
        if isinstance(opened, TCPStore):
            return opened
        if "EADDRINUSE" in str(opened):
            raise RendezvousError(
                f"{self._who} cannot host the rendezvous at {self._where}: port {self.port} is in use; choose"
                " another port, on all ranks, or end the program that holds it"
            ) from opened
        raise RendezvousError(
            f"{self._who} cannot use {self._where} as a rendezvous store ({opened}); choose another port, on"
            " all ranks"
        ) from opened

    def _construct_store(self, host: str, result: queue.Queue[TCPStore | Exception]) -> None:
        timeout = timedelta(seconds=max(PATIENCE, self.timeout))
        try:
            result.put(
                TCPStore(
                    host, self.port, is_master=self._hosts_store, wait_for_workers=False, timeout=timeout
                )
            )
        except Exception as error:
            result.put(error)

    def _wait_for_listener(self, deadline: float) -> None:
        """Try until something accepts a connection.

        The store's own attempts would fill the terminal with traces.
        """
        reason: OSError | None = None
        for remaining in _attempts(deadline):
            try:
                socket.create_connection((self.host, self.port), timeout=remaining).close()
                return
            except OSError as error:
                reason = error
        raise RendezvousError(
            f"{self._who} found no rank 0 at {self._where} within {self.timeout:g} s ({reason}); check that"
            f" rank 0 is started and runs on host {self.host!r}, and that port {self.port} is the same on all"
            f" ranks and open. {TIMEOUT_VARIABLE} sets the seconds to wait"
        ) from reason

    def agree(self, store: Store, deadline: float) -> str:
        """Sign in and do as rank 0 decides: return the name of this meeting, equal on all ranks, or raise.

        Every sign-in has a ticket of its own and is taken back in the end, so a store that outlives the
        meeting (the agent's) can serve the next one.
        """
        process = f"process {os.getpid()} on {socket.gethostname()}"
        first = store.compare_set(f"process/{self.rank}", "", process).decode()
        if first != process:
            raise RendezvousError(
                f"rank {self.rank} joined at {self._where} twice: {first}, then {process}; give every process"
                " its own rank and every job its own port"
            )
        ticket = uuid.uuid4().hex
        store.set(f"rank/{self.rank}", f"{ticket} {self._signature}")
        verdict = (
            self._decide(store, deadline) if self.rank == 0 else self._await_verdict(store, ticket, deadline)
        )
        store.set(f"rank/{self.rank}", "")
        if not verdict.startswith(AGREED):
            raise RendezvousError(verdict)
        return verdict.removeprefix(AGREED)

    def _decide(self, store: Store, deadline: float) -> str:
        """What rank 0 does: wait for all, judge, tell all who came, and wait until they have read it."""
        store.set("world_size", str(self.world_size))
        tickets: dict[int, str] = {}
        signatures: dict[int, str] = {}
        for _ in _attempts(deadline):
            for rank in range(self.world_size):
                if rank not in tickets and (sign_in := _sign_in(store, rank)):
                    tickets[rank], _, signatures[rank] = sign_in.partition(" ")
            if len(tickets) == self.world_size:
                break
        verdict = self._judge(signatures) or AGREED + tickets[0]
        for ticket in tickets.values():
            store.set(f"verdict/{ticket}", verdict)
        others = [rank for rank in tickets if rank != 0]
        for _ in _attempts(time.monotonic() + FAREWELL):
            others = [rank for rank in others if _sign_in(store, rank)]
            if not others:
                break
        return verdict

    def _judge(self, signatures: Mapping[int, str]) -> str | None:
        if missing := [str(rank) for rank in range(self.world_size) if rank not in signatures]:
            return (
                f"{len(missing)} of {self.world_size} ranks did not join at {self._where} within"
                f" {self.timeout:g} s: rank {', '.join(missing)}; see whether they failed or were never"
                f" started. {TIMEOUT_VARIABLE} sets the seconds to wait"
            )
        for rank, theirs in signatures.items():
            if theirs != self._signature:
                return (
                    f"the ranks at {self._where} were not launched alike: rank 0 with {self._signature}, rank"
                    f" {rank} with {theirs}; give all ranks the same config, backend and world size"
                )
        return None

    def _await_verdict(self, store: Store, ticket: str, deadline: float) -> str:
        for _ in _attempts(deadline):
            if store.check([f"verdict/{ticket}"]):
                return store.get(f"verdict/{ticket}").decode()
            if store.check(["world_size"]) and self.rank >= (size := int(store.get("world_size"))):
                return (
                    f"{self._who} is not part of the job at {self._where}, which rank 0 launched with"
                    f" world_size={size}"
                )
        return (
            f"{self._who} waited {self.timeout:g} s at {self._where} for the other ranks; see whether they"
            f" failed or were never started. {TIMEOUT_VARIABLE} sets the seconds to wait"
        )


def _sign_in(store: Store, rank: int) -> str:
    """Return what ``rank`` has reported; nothing if it has not come, or has left."""
    return store.get(f"rank/{rank}").decode() if store.check([f"rank/{rank}"]) else ""


def read_timeout() -> float:
    """Seconds to wait for the other ranks, from the environment or the default."""
    return read_seconds(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)


def read_seconds(variable: str, default: float = 0.0) -> float:
    """The positive number of seconds that an environment variable says, or the default."""
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{variable} must be a positive number of seconds, got {text!r}")
    return seconds


def _agent_hosts_store(port: int) -> bool:
    """torchrun, and our ``spawn``, host the store themselves; rank 0 must then not bind the port."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agent and os.environ.get("MASTER_PORT", str(port)) == str(port)


def _attempts(deadline: float) -> Iterator[float]:
    """Yield the seconds that remain: at least once, often at first, then twice a second."""
    pause = 0.01
    while True:
        remaining = deadline - time.monotonic()
        yield max(0.1, remaining)
        if remaining <= 0:
            return
        time.sleep(min(pause, remaining))
        pause = min(0.5, pause * 1.5)
