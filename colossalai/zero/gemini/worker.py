"""Updates of chunks on a thread of their own, in the order in which the next step will need them.

A job waits until its gradient has arrived on the host, then updates the weights there.  Whoever needs the weights of a chunk waits for
its job alone.  An error in a job is raised where somebody waits for it.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], None]


@dataclass(order=True)
class _Job:
    priority: int
    key: int
    name: str = field(compare=False)
    work: Work = field(compare=False)


class _Shared:
    """What the thread holds on to; not the worker itself, so that the thread ends when nobody holds the worker."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.jobs: list[_Job] = []
        self.pending: set[int] = set()
        self.error: tuple[str, BaseException] | None = None
        self.closed = False


def _run(shared: _Shared) -> None:
    while True:
        with shared.changed:
            while not shared.jobs and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                return
            job = heapq.heappop(shared.jobs)
        try:
            if shared.error is None:  # after a failure the rest is not done: weights must not run apart
                job.work()
        except BaseException as error:
            shared.error = (job.name, error)
        with shared.changed:
            shared.pending.discard(job.key)
            shared.changed.notify_all()
        del job


def _close(shared: _Shared) -> None:
    with shared.changed:
        shared.closed = True
        shared.changed.notify_all()


class Worker:
    """One thread, started with the first job."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _close, self._shared)

    def submit(self, key: int, priority: int, name: str, work: Work) -> None:
        """Do ``work``; of several that wait, the one with the smallest ``priority`` is next."""
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._shared,), name="gemini-update", daemon=True
            )
            self._thread.start()
        with self._shared.changed:
            assert key not in self._shared.pending, name
            self._shared.pending.add(key)
            heapq.heappush(self._shared.jobs, _Job(priority, key, name, work))
            self._shared.changed.notify_all()

    def is_done(self, key: int) -> bool:
        return key not in self._shared.pending

    def wait(self, key: int) -> None:
        """Until the job of ``key`` is done."""
        if key in self._shared.pending:
            with self._shared.changed:
                while key in self._shared.pending:
                    self._shared.changed.wait()
        self._check()

    def wait_all(self) -> None:
        with self._shared.changed:
            while self._shared.pending:
                self._shared.changed.wait()
        self._check()

    def wait_any(self) -> None:
        """Until one more job is done."""
        with self._shared.changed:
            before = len(self._shared.pending)
            while self._shared.pending and len(self._shared.pending) >= before:
                self._shared.changed.wait()
        self._check()

    def _check(self) -> None:
        if self._shared.error is not None:
            name, error = self._shared.error
            raise RuntimeError(f"the update of {name} failed: {type(error).__name__}: {error}") from error
