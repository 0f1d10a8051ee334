"""How the ranks of a job find each other, with one clear error on every rank when they cannot.

Rank 0 (or torchrun's agent) hosts a key-value store at ``host:port``.  Every rank signs in there with what it
was launched with; rank 0 waits for all, compares, and writes the verdict that all ranks act on.  Only then is a
process group made, so a wrong rank, size, host or port ends here, within a stated time, and never as a hang.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import default_pg_timeout

TIMEOUT_VARIABLE = "COLOSSALAI_RENDEZVOUS_TIMEOUT"
DEFAULT_TIMEOUT = 300.0
# Seconds that rank 0 keeps the store for the others to read a refusal.
FAREWELL = 5.0
# Seconds that opening a store may take at least: it looks addresses up, and a name server may be slow.
PATIENCE = 15.0
AGREED = "agreed"


class RendezvousError(RuntimeError):
    """The ranks did not come together; the message names the host, the port and what to do."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """One meeting of all ranks.

    ``plan`` is what must be equal on all ranks.  ``round`` counts the launches of this process, so that a second
    launch does not read the keys of the first.
    """

    rank: int
    world_size: int
    host: str
    port: int
    timeout: float
    plan: str = ""
    round: int = 0

    def meet(self) -> Store:
        """The store for ``init_process_group``, once all ranks have signed in with the same plan."""
        deadline = time.monotonic() + self.timeout
        while True:
            store = self._connect(deadline)
            try:
                self.agree(PrefixStore(self._prefix, store), deadline)
            except dist.DistNetworkError as error:
                # The store went away: its host is leaving an earlier round, or has failed.  Only a new try tells.
                if time.monotonic() >= deadline:
                    raise RendezvousError(f"{self._who} lost the store at {self._where}: {error}") from error
                time.sleep(0.2)
                continue
            store.set_timeout(default_pg_timeout)
            return PrefixStore(f"{self._prefix}/groups", store)

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
    def _prefix(self) -> str:
        return f"colossalai/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{self.round}"

    @property
    def _signature(self) -> str:
        return f"world_size={self.world_size}" + (f", {self.plan}" if self.plan else "")

    def _connect(self, deadline: float) -> TCPStore:
        if self._hosts_store:
            store = self._open_store("localhost", deadline)
            self._wait_for_listener(deadline)  # as the others will: the host may be another machine
            return store
        self._wait_for_listener(deadline)
        return self._open_store(self.host, deadline)

    def _open_store(self, host: str, deadline: float) -> TCPStore:
        # A client that meets the port of another program waits for its answer for ever, whatever timeout it is
        # given, so the constructor runs in a thread that can be left behind.
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
                f"{self._who} cannot host the rendezvous at {self._where}: port {self.port} is in use; choose "
                "another port, on all ranks, or end the program that holds it"
            ) from opened
        raise RendezvousError(
            f"{self._who} cannot use {self._where} as a rendezvous store ({opened}); choose another port, on all ranks"
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
        """Try until something accepts a connection.  The store's own attempts would fill the terminal with traces."""
        reason: OSError | None = None
        for remaining in _attempts(deadline):
            try:
                socket.create_connection((self.host, self.port), timeout=remaining).close()
                return
            except OSError as error:
                reason = error
        raise RendezvousError(
            f"{self._who} found nobody at {self._where} within {self.timeout:g} s ({reason}); check that rank 0 is "
            f"started and runs on host {self.host!r}, and that port {self.port} is the same on all ranks and open. "
            f"{TIMEOUT_VARIABLE} sets the seconds to wait"
        ) from reason

    def agree(self, store: Store, deadline: float) -> None:
        """Sign in at ``store`` and wait for the verdict: return when it is to go on, raise when it is not."""
        process = f"process {os.getpid()} on {socket.gethostname()}"
        first = store.compare_set(f"process/{self.rank}", "", process).decode()
        if first != process:
            raise RendezvousError(
                f"rank {self.rank} joined at {self._where} twice: {first}, then {process}; give every process its own "
                "rank and every job its own port"
            )
        store.set(f"signature/{self.rank}", self._signature)
        if self.rank == 0:
            verdict = self._judge(store, deadline)
            store.set("verdict", verdict)
            if verdict != AGREED:
                self._let_others_read(store)
        else:
            verdict = self._await_verdict(store, deadline)
        if verdict != AGREED:
            raise RendezvousError(verdict)

    def _judge(self, store: Store, deadline: float) -> str:
        missing = list(range(self.world_size))
        for _ in _attempts(deadline):
            missing = [rank for rank in missing if not store.check([f"signature/{rank}"])]
            if not missing:
                break
        else:
            return (
                f"{len(missing)} of {self.world_size} ranks did not join at {self._where} within {self.timeout:g} s: "
                f"rank {', '.join(map(str, missing))}; see whether they failed or were never started. "
                f"{TIMEOUT_VARIABLE} sets the seconds to wait"
            )
        for rank in range(self.world_size):
            theirs = store.get(f"signature/{rank}").decode()
            if theirs != self._signature:
                return (
                    f"the ranks at {self._where} were not launched alike: rank 0 with {self._signature}, rank {rank} "
                    f"with {theirs}; give all ranks the same config, backend and world size"
                )
        return AGREED

    def _await_verdict(self, store: Store, deadline: float) -> str:
        for _ in _attempts(deadline):
            if store.check(["verdict"]):
                break
        else:
            return (
                f"{self._who} waited {self.timeout:g} s at {self._where} for the other ranks; see whether they failed "
                f"or were never started. {TIMEOUT_VARIABLE} sets the seconds to wait"
            )
        verdict = store.get("verdict").decode()
        signature = store.get("signature/0").decode()
        store.add("read", 1)
        if verdict == AGREED and signature != self._signature:  # rank 0 counts fewer ranks than this one
            return (
                f"{self._who} is not part of the job at {self._where}, which rank 0 launched with {signature}"
            )
        return verdict

    def _let_others_read(self, store: Store) -> None:
        others = [rank for rank in range(1, self.world_size) if store.check([f"signature/{rank}"])]
        for _ in _attempts(time.monotonic() + FAREWELL):
            if store.add("read", 0) >= len(others):
                return


def read_timeout() -> float:
    """Seconds to wait for the other ranks, from the environment or the default."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE} must be a positive number of seconds, got {text!r}")
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
