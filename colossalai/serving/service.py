"""``Service``: requests go to ranks and answers come back, also when a rank dies or hangs.

Everything that happens to the ranks passes through one thread, so it has one order: a request is pending from
the moment it is accepted until its last answer, and when the ranks fail, every pending request is told why,
before anything else is done.  Then the ranks are started anew, or the service ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from colossalai.serving.errors import QueueFullError, ServiceError, StartError
from colossalai.serving.ranks import Died, RankMessage, Ranks
from colossalai.serving.wire import pack_frame
from colossalai.serving.worker import BEAT, EVENTS, FAILED, READY, Job

State = Literal["starting", "ready", "restarting", "ended"]
_GRACE = 0.5  # seconds in which the cause of a lost connection shows up
_STOP = 10.0  # seconds in which ranks end by themselves
_WINDOW = 600.0  # seconds after which a restart is forgotten


@dataclass(frozen=True)
class Answer:
    """What a rank said to a request; after ``last`` nothing more comes.  ``failure``: the service is at
    fault.
    """

    uid: int
    value: Any = None
    last: bool = True
    failure: str | None = None


Deliver = Callable[[Answer], None]


def log(text: str) -> None:
    print(f"colossalai serve: {text}", file=sys.stderr, flush=True)


class Service:
    """Ranks that answer requests.

    Args:
        limit: how many requests may be pending; further ones raise ``QueueFullError``.  0: any number.
        restarts: how many times in ten minutes the ranks are started anew.
        patience: seconds in which the ranks must say something while a request is pending; else they hang.
        start_timeout: seconds that a start may take.
        on_end: called once, with the reason, when the service ends by itself.
    """

    def __init__(
        self,
        job: Job,
        *,
        limit: int = 0,
        restarts: int = 3,
        patience: float = 120.0,
        start_timeout: float = 1800.0,
        on_end: Callable[[str], None] | None = None,
        log: Callable[[str], None] = log,
    ) -> None:
        for name, value in (("patience", patience), ("start_timeout", start_timeout)):
            if value <= 0:
                raise ValueError(f"{name} is in seconds and must be positive, got {value!r}")
        self.job = job
        self.beat: Any = None
        """What the first rank last said of itself."""
        self.restarted = 0
        self._limit, self._restarts, self._patience = limit, restarts, patience
        self._start_timeout = start_timeout
        self.on_end, self._log = on_end, log
        self._state: State = "starting"
        self._reason = ""
        self._lock = threading.Lock()
        self._pending: dict[int, Deliver] = {}
        self._uids = itertools.count(1)
        self._ranks: Ranks | None = None
        self._arrived: queue.SimpleQueue[tuple[Ranks | None, RankMessage | Died]] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._recent: deque[float] = deque()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)

    # -- from other threads

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str:
        """Why it has ended or is restarting."""
        return self._reason

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks of this node."""
        return self._ranks.pids if self._ranks is not None else {}

    def start(self) -> None:
        """Start the ranks; returns when all are ready, or raises ``StartError`` with the reason."""
        self._start_ranks()
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._state != "starting")
            if self._state == "ended":
                raise StartError(self._reason)

    def ask(self, kind: str, value: Any, deliver: Deliver, *, everyone: bool = False) -> int:
        """Send a request to the first rank, or to all; ``deliver`` gets its answers, in a thread of ours.

        What cannot be sent is a ``TypeError`` here, and no request.
        """
        uid = next(self._uids)
        frame = pack_frame(kind, [uid, value])
        with self._lock:
            if self._state != "ready" or self._ranks is None:
                raise ServiceError(self._reason or "the service has not started")
            if self._limit and len(self._pending) >= self._limit:
                raise QueueFullError(f"Submit queue full, size: {self._limit}")
            if not self._pending:
                self._heard = time.monotonic()
            self._pending[uid] = deliver
            ranks = self._ranks
        ranks.send(frame, None if everyone else 0)
        return uid

    def cancel(self, uid: int) -> None:
        """The answers to a request are of no interest any more."""
        with self._lock:
            known = self._pending.pop(uid, None)
            ranks = self._ranks if self._state == "ready" else None
        if known is not None and ranks is not None:
            ranks.send(pack_frame("cancel", uid), 0)

    def close(self) -> None:
        """End the ranks.  What is pending fails."""
        with self._lock:
            ended, self._state = self._state == "ended", "ended"
            self._reason = self._reason or "the service was shut down"
            ranks, self._ranks = self._ranks, None
            self._changed.notify_all()
        if not ended:
            self._fail_pending(self._reason)
        if ranks is not None:
            ranks.stop(_STOP)
        self._arrived.put((None, Died(-1, "closed")))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(30.0)

    # -- in the thread of the service

    def _start_ranks(self) -> None:
        ranks = Ranks(self.job, lambda message: self._arrived.put((ranks, message)))
        with self._lock:
            if self._state == "ended":
                return
            self._ranks, self._ready, self._since = ranks, set[int](), time.monotonic()
        ranks.start()

    def _run(self) -> None:
        while self._state != "ended":
            try:
                ranks, message = self._arrived.get(timeout=self._until_look())
            except queue.Empty:
                self._look()
                continue
            if ranks is not None and ranks is self._ranks:
                self._take(message)

    def _until_look(self) -> float:
        waited = time.monotonic() - (self._heard if self._state == "ready" else self._since)
        most = self._patience if self._state == "ready" else self._start_timeout
        return max(0.05, min(1.0, most - waited))

    def _look(self) -> None:
        """Nothing has arrived for a while: is that too long?"""
        now, ranks = time.monotonic(), self._ranks
        if ranks is None:
            return
        if self._state == "ready" and self._pending and now - self._heard > self._patience:
            stacks = ranks.where_they_are()
            self._log(f"the ranks have said nothing for {self._patience:g} s:\n{stacks}")
            self._fail(f"the ranks hang: nothing came from them for {self._patience:g} s", ranks)
        elif self._state in ("starting", "restarting") and now - self._since > self._start_timeout:
            self._log(f"the ranks did not start:\n{ranks.where_they_are()}")
            self._fail(f"the ranks did not start within {self._start_timeout:g} s", ranks)

    def _take(self, message: RankMessage | Died) -> None:
        assert self._ranks is not None
        if isinstance(message, Died) or message.kind == FAILED:
            self._fail(self._cause(message, self._ranks), self._ranks)
            return
        self._heard = time.monotonic()
        if message.kind == EVENTS:
            self._answer(message.value)
        elif message.kind == BEAT:
            self.beat = message.value
        elif message.kind == READY:
            self._ready.add(message.rank)
            if len(self._ready) == self.job.ranks:
                self._become("ready", "")

    def _answer(self, answers: list[Any] | str) -> None:
        for uid, value, last in json.loads(answers) if isinstance(answers, str) else answers:
            with self._lock:
                deliver = self._pending.pop(uid, None) if last else self._pending.get(uid)
            if deliver is not None:
                self._deliver(deliver, Answer(uid, value, last))

    def _deliver(self, deliver: Deliver, answer: Answer) -> None:
        try:
            deliver(answer)
        except Exception:  # of one who asked; all others depend on this thread
            self._log(f"an answer could not be delivered:\n{traceback.format_exc()}")

    def _cause(self, first: RankMessage | Died, ranks: Ranks) -> str:
        """The most telling of the failures that come together: a rank that died, then the first that
        raised.
        """
        found = [first]
        deadline = time.monotonic() + _GRACE
        while (left := deadline - time.monotonic()) > 0 and not isinstance(found[-1], Died):
            with contextlib.suppress(queue.Empty):
                source, message = self._arrived.get(timeout=left)
                if source is not ranks:
                    continue
                if isinstance(message, Died) or message.kind == FAILED:
                    found.append(message)
                elif message.kind == EVENTS:
                    self._answer(message.value)
        cause = next((failure for failure in found if isinstance(failure, Died)), first)
        if isinstance(cause, Died):
            return f"rank {cause.rank} died: {cause.how}"
        self._log(f"rank {cause.rank} failed:\n{cause.value['traceback']}")
        return f"rank {cause.rank} failed: {cause.value['summary']}"

    def _fail(self, reason: str, ranks: Ranks) -> None:
        """Tell all who wait, end what is left of the ranks, and start them anew or end."""
        started = self._state != "starting"
        now = time.monotonic()
        while self._recent and now - self._recent[0] > _WINDOW:
            self._recent.popleft()
        again = started and len(self._recent) < self._restarts and self.job.nodes == 1
        if not self._become("restarting" if again else "ended", reason):
            return
        self._fail_pending(reason)
        self._log(reason)
        ranks.kill()
        if not again:
            self._end(reason, started)
            return
        self._recent.append(now)
        self.restarted += 1
        self._log(
            f"the ranks are started anew ({len(self._recent)} of {self._restarts} times in ten minutes)"
        )
        try:
            self._start_ranks()
        except Exception as error:
            if self._become("ended", f"{reason}; they could not be started anew: {error}"):
                self._end(self._reason, started)

    def _end(self, reason: str, started: bool) -> None:
        if started:
            self._log(f"the service ends: {reason}")
            if self.on_end is not None:
                self.on_end(reason)

    def _become(self, state: State, reason: str) -> bool:
        """Whether that was possible: a service that has ended stays so."""
        with self._lock:
            if self._state == "ended":
                return False
            self._state, self._reason, self._heard = state, reason, time.monotonic()
            self._changed.notify_all()
        return True

    def _fail_pending(self, reason: str) -> None:
        with self._lock:
            failed, self._pending = self._pending, {}
        for uid, deliver in failed.items():
            self._deliver(deliver, Answer(uid, failure=reason))


__all__ = ["Answer", "Deliver", "Service", "State", "log"]
