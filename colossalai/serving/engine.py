"""``launch_engine`` and ``AsyncEngine``: any model behind ranks, with a queue in front of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from colossalai.serving.batching import BatchManager, SubmitEntry, TaskEntry
from colossalai.serving.errors import QueueFullError, ServiceError
from colossalai.serving.forward import BatchForward
from colossalai.serving.ranks import Died, RankMessage, Ranks
from colossalai.serving.service import Answer, Service, log
from colossalai.serving.worker import FAILED, Job

SECRET_VARIABLE = "COLOSSALAI_SERVING_SECRET"
_PATIENCE = 600.0  # seconds without a word of the ranks, which say nothing while a batch is computed
_Results = dict[Hashable, Future[Any]]


class AsyncEngine:
    """A queue of requests, batches that are made of it, and ranks that compute them.

    ``launch_engine`` makes one.  At most ``pipe_size`` batches for each stage are under way.
    """

    def __init__(
        self,
        service: Service,
        batch_manager: BatchManager | None = None,
        pipe_size: int = 1,
        queue_size: int = 0,
        verbose: bool = True,
    ) -> None:
        if pipe_size < 1 or queue_size < 0:
            raise ValueError(
                "an engine needs a pipe_size of at least 1 and a queue_size of at least 0 (no limit), got"
                f" {pipe_size!r} and {queue_size!r}"
            )
        self.service = service
        self._batches = batch_manager or BatchManager()
        self._queue_size, self._verbose = queue_size, verbose
        self._queue: deque[SubmitEntry] = deque()
        self._results: dict[Hashable, Future[Any]] = {}
        self._free = pipe_size * service.job.pp
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._submit_loop, name="engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    def submit(self, uid: Hashable, data: Any) -> None:
        """Put a request into the queue; ``uid`` is a name of your choice for it, of which there is one.

        ``data`` is not copied: leave its tensors as they are until the result is there.
        """
        with self._changed:
            if not self._open:
                raise ServiceError("the engine was shut down")
            if uid in self._results:
                raise ValueError(f"there is a request {uid!r} already, whose result nobody has fetched")
            if self._queue_size and len(self._queue) >= self._queue_size:
                raise QueueFullError(f"Submit queue full, size: {self._queue_size}")
            self._results[uid] = Future()
            self._queue.append(SubmitEntry(uid, data))
            self._changed.notify_all()

    async def wait(self, uid: Hashable) -> Any:
        """The result of a request.  A caller that is cancelled gives it up."""
        result = self._result(uid)
        try:
            return await asyncio.wrap_future(result)
        finally:
            self._forget(uid, result)

    def get(self, uid: Hashable, interval: float = 0.05) -> Any:
        """As ``wait``, for threads; ``interval`` is of no effect, since nothing is polled."""
        result = self._result(uid)
        try:
            return result.result()
        finally:
            self._forget(uid, result)

    def shutdown(self) -> None:
        """End the ranks; what was not computed fails."""
        with self._changed:
            self._open = False
            self._queue.clear()
            self._changed.notify_all()
        atexit.unregister(self.shutdown)
        self.service.close()
        with self._changed:
            left = list(self._results.values())
        _fail(left, ServiceError("the engine was shut down"))

    def _result(self, uid: Hashable) -> Future[Any]:
        with self._changed:
            if uid not in self._results:
                raise KeyError(f"no request {uid!r} was submitted, or its result was fetched already")
            return self._results[uid]

    def _forget(self, uid: Hashable, result: Future[Any]) -> None:
        result.cancel()  # if it is not there yet, nobody shall wait for it any more
        with self._changed:
            if self._results.get(uid) is not result:
                return
            del self._results[uid]
            index = next((i for i, entry in enumerate(self._queue) if entry.uid == uid), None)
            if index is not None:
                del self._queue[index]

    def _submit_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or (self._queue and self._free))
                if not self._open:
                    return
                made = self._make_batch()
                if made is None:
                    continue
                self._free -= 1
            self._send(*made)

    def _make_batch(self) -> tuple[TaskEntry, dict[str, Any], _Results] | None:
        """The next batch, and where its results go: a name may be given anew while the batch is computed."""
        before = {entry.uid: self._results[entry.uid] for entry in self._queue}
        task, info = TaskEntry((), None), dict[str, Any]()
        why: Exception = RuntimeError("make_batch of the batch manager put this request into no batch")
        try:
            task, info = self._batches.make_batch(self._queue)
        except Exception as error:  # of a batch manager, or of a request that it cannot read
            why = error
        queued = {entry.uid for entry in self._queue}
        taken = {uid: result for uid, result in before.items() if uid not in queued}
        if not taken:  # it would do so for ever
            self._queue.clear()
            taken = before
        _fail([result for uid, result in taken.items() if uid not in task.uids], why)
        results = {uid: taken[uid] for uid in task.uids if uid in taken}
        return (task, info, results) if results else None

    def _send(self, task: TaskEntry, info: dict[str, Any], results: _Results) -> None:
        began = time.monotonic()

        def deliver(answer: Answer) -> None:
            with self._changed:
                self._free += 1
                self._changed.notify_all()
            self._take(task, info, results, answer, time.monotonic() - began)

        try:
            self.service.ask("forward", task.batch, deliver, everyone=True)
        except Exception as error:  # the service has ended, or the batch holds what cannot be sent
            with self._changed:
                self._free += 1
            _fail(results.values(), error)

    def _take(
        self, task: TaskEntry, info: dict[str, Any], results: _Results, answer: Answer, seconds: float
    ) -> None:
        if answer.failure is not None:
            _fail(results.values(), ServiceError(answer.failure))
            return
        if "error" in answer.value:
            _fail(results.values(), ValueError(answer.value["error"]))
            return
        if self._verbose:
            log(f"batch size: {len(task.uids)}, time: {seconds:.3f}")
        why: Exception = RuntimeError("split_batch of the batch manager gave no result for this request")
        try:
            done = TaskEntry(task.uids, answer.value["output"])
            for uid, output in self._batches.split_batch(done, **info):
                if uid in results:
                    with contextlib.suppress(InvalidStateError):  # it was given up
                        results[uid].set_result(output)
        except Exception as error:
            why = error
        _fail(results.values(), why)


def _fail(results: Iterable[Future[Any]], error: Exception) -> None:
    """End those of ``results`` that have not ended."""
    for result in results:
        with contextlib.suppress(InvalidStateError):
            result.set_exception(error)


def launch_engine(
    tp_world_size: int,
    pp_world_size: int,
    master_host: str,
    master_port: int,
    rpc_port: int,
    model_fn: Callable[..., Any],
    n_nodes: int = 1,
    node_rank: int = 0,
    batch_manager: BatchManager | None = None,
    pipe_size: int = 1,
    queue_size: int = 0,
    rpc_disable_shm: bool = True,
    **model_kwargs: Any,
) -> AsyncEngine | None:
    """Start ranks that run ``model_fn(**model_kwargs)``; the engine in front of them, once all are ready.

    ``model_fn`` is a function of a module, called on every rank of a launched job of ``tp_world_size`` x
    ``pp_world_size``.  On one node everything stays on the loopback address: ``master_port`` is where the
    ranks meet (0: a port of the system's choice), and ``rpc_port`` is not used.  On several nodes call it on
    each, with the same ``COLOSSALAI_SERVING_SECRET`` in the environment; ranks of other nodes report to
    ``rpc_port`` of ``master_host``, and prove that they know the secret.  There it returns None when the
    service has ended.  ``rpc_disable_shm`` is of no effect.

    The script that calls it must do so under ``if __name__ == "__main__":``, as any that starts processes.
    """
    job = Job(
        BatchForward,
        {"model_fn": model_fn, "model_kwargs": model_kwargs},
        tp=tp_world_size,
        pp=pp_world_size,
        nodes=n_nodes,
        node_rank=node_rank,
        host=master_host if n_nodes > 1 else "127.0.0.1",
        port=master_port,
        control_port=rpc_port,
        secret=os.environ.get(SECRET_VARIABLE, "").encode() if n_nodes > 1 else b"",
    )
    if node_rank != 0:
        _work_for_another_node(job)
        return None
    return launch_job(job, batch_manager, pipe_size, queue_size)


def launch_job(
    job: Job,
    batch_manager: BatchManager | None = None,
    pipe_size: int = 1,
    queue_size: int = 0,
    verbose: bool = True,
) -> AsyncEngine:
    """The engine in front of ``job``, once its ranks are ready."""
    service = Service(job, patience=_PATIENCE)
    service.start()
    try:
        return AsyncEngine(service, batch_manager, pipe_size, queue_size, verbose)
    except BaseException:
        service.close()
        raise


def _work_for_another_node(job: Job) -> None:
    """Run the ranks of this node until the service, on the first node, has ended."""
    failed: list[str] = []

    def note(message: RankMessage | Died) -> None:
        if isinstance(message, Died) and "exit code 0" not in message.how and "SIGKILL" not in message.how:
            failed.append(f"rank {message.rank}: {message.how}")
        elif isinstance(message, RankMessage) and message.kind == FAILED:
            failed.append(f"rank {message.rank}: {message.value['summary']}")

    ranks = Ranks(job, note)
    ranks.start()
    try:
        ranks.wait_all()
    finally:
        ranks.kill()
    if failed:
        raise ServiceError("; ".join(failed))
