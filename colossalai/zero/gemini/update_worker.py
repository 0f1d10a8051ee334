"""A thread that updates chunks on the host, in the order in which the next step will need them.

A job waits until its gradients have arrived on the host, then updates the weights there.  A module that needs
the weights of a chunk waits for the job of this chunk alone.  An error in a job is raised in the thread that
waits for it.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], None]
Ready = Callable[[], bool]  # also of ``prepare``: whether it has begun to read what the job needs


@dataclass(order=True)
class _Job:
    priority: int
    key: int
    number: int = field(compare=False)
    name: str = field(compare=False)
    work: Work = field(compare=False)
    is_ready: Ready = field(compare=False)
    prepare: Ready = field(compare=False)
    prepared: bool = field(default=False, compare=False)


def _at_once() -> bool:
    return True


def nothing() -> bool:
    return False


class _WorkerState:
    """The state that the thread refers to; not the worker itself, so that the thread ends when the worker is
    freed.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.jobs: list[_Job] = []
        self.pending: set[int] = set()
        self.error: tuple[str, BaseException] | None = None
        self.closed = False
        self.thread: threading.Thread | None = None


def _run(shared: _WorkerState) -> None:
    while True:
        with shared.changed:
            while not shared.jobs and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                return
            job = _next(shared.jobs)
            following = _following(shared.jobs)
        try:
            if shared.error is None:  # after a failure the rest is not done: weights must not run apart
                _do(job, following)
        except BaseException as error:
            shared.error = (job.name, error)
        key = job.key
        del job, following  # they refer to the model, which may be freed as soon as no thread waits for them
        with shared.changed:
            shared.pending.discard(key)
            shared.changed.notify_all()


def _do(job: _Job, following: _Job | None) -> None:
    for soon in (job, following):
        if soon is not None:
            soon.prepared = soon.prepare()
    job.work()


def _next(jobs: list[_Job]) -> _Job:
    """Remove and return the most urgent job whose gradients have arrived; if none have, the one whose were
    sent first.
    """
    ready = [job for job in jobs if job.is_ready()]
    job = min(ready, key=_urgency) if ready else min(jobs, key=lambda waiting: waiting.number)
    jobs.remove(job)
    return job


def _following(jobs: list[_Job]) -> _Job | None:
    """Return the job that would be next if no other came."""
    return min((job for job in jobs if job.is_ready()), key=_urgency, default=None)


def _urgency(job: _Job) -> tuple[bool, int, int]:
    """Sort jobs: one that has been prepared holds a buffer and goes first."""
    return not job.prepared, job.priority, job.key


def _close(shared: _WorkerState) -> None:
    # no waiting here: the garbage collector may call this while the thread it interrupts holds any lock
    with shared.changed:
        shared.closed = True
        shared.changed.notify_all()


_running: weakref.WeakSet[_WorkerState] = weakref.WeakSet()


def _close_all() -> None:
    """End all threads when the script ends: one that returned from CUDA later would abort the process."""
    for shared in list(_running):
        _close(shared)
        if shared.thread is not None:
            shared.thread.join()


def _start(shared: _WorkerState) -> None:
    atexit.unregister(_close_all)  # of an earlier one
    atexit.register(_close_all)
    _running.add(shared)
    shared.thread = threading.Thread(target=_run, args=(shared,), name="gemini-update", daemon=True)
    shared.thread.start()


class UpdateWorker:
    """A thread for updates, started with the first job."""

    def __init__(self) -> None:
        self._shared = _WorkerState()
        self._count = 0
        weakref.finalize(self, _close, self._shared)

    def submit(
        self,
        key: int,
        priority: int,
        name: str,
        work: Work,
        is_ready: Ready = _at_once,
        prepare: Ready = nothing,
    ) -> None:
        """Queue ``work``; of the jobs that are ready, the one with the smallest ``priority`` is next.

        ``is_ready`` says whether the gradients have arrived: the script runs ahead of the device, and a job
        that is not ready would keep the thread waiting while others could go on.  ``prepare`` is called while
        the job before is being done, and returns whether it could begin.
        """
        self._check()
        if self._shared.thread is None:
            _start(self._shared)
        with self._shared.changed:
            assert key not in self._shared.pending, name
            self._shared.pending.add(key)
            self._count += 1
            self._shared.jobs.append(_Job(priority, key, self._count, name, work, is_ready, prepare))
            self._shared.changed.notify_all()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is a job."""
        return threading.current_thread() is self._shared.thread

    def is_done(self, key: int) -> bool:
        return key not in self._shared.pending

    def wait(self, key: int) -> None:
        """Wait until the job of ``key`` is done."""
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

    def wait_any(self) -> bool:
        """Wait until one more job is done; return False if there is none."""
        with self._shared.changed:
            before = len(self._shared.pending)
            while self._shared.pending and len(self._shared.pending) >= before:
                self._shared.changed.wait()
        self._check()
        return before > 0

    def _check(self) -> None:
        if self._shared.error is not None:
            name, error = self._shared.error
            raise RuntimeError(f"the update of {name} failed: {type(error).__name__}: {error}") from error
