"""A thread in every rank of a job that reports, once, when the job stands still.

[Note: how ranks agree on a report] Each watchdog looks at its own process at a short interval.  One that has
seen no movement for the whole timeout tries to open the next round in the store; exactly one rank succeeds,
and that rank writes the report.  All watchdogs poll the number of rounds, so each posts its snapshot, also
the ranks that are merely busy elsewhere. The store connection is a clone: the main thread may be blocked
inside a call on the original.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from colossalai.utils.watchdog.report import explain
from colossalai.utils.watchdog.snapshot import RankSnapshot, progress, take_snapshot


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Watchdog:
    """Report where every rank is after ``timeout`` seconds in which this rank has not moved.

    A rank has not moved when its main thread stood on the same instruction at every look and no collective
    was issued.  The report goes to ``report`` on one rank and the job goes on waiting: a long checkpoint is
    legal, and ending a stuck job is for the timeout of the process group.  All ranks must run one, after the
    process group exists::

        with Watchdog(timeout=60):
            train()
    """

    def __init__(self, *, timeout: float = 60.0, report: Callable[[str], None] = _to_stderr) -> None:
        if timeout <= 0:
            raise ValueError(f"the timeout of a Watchdog is in seconds and must be positive, got {timeout}")
        if not dist.is_initialized():
            raise RuntimeError(
                "a Watchdog needs the process group to reach the other ranks: call colossalai.launch first"
            )
        self._timeout = timeout
        self._interval = min(5.0, timeout / 10)
        self._report = report
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore("watchdog", store)  # type: ignore[attr-defined]
        self._answered = self._store.add("rounds", 0)  # an earlier watchdog of this job may have opened some
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)  # it may be blocked on a store that is gone

    def _run(self) -> None:
        try:
            self._watch()
        except RuntimeError as error:
            if not self._stopped.is_set():
                self._report(
                    f"the watchdog of rank {self._rank} lost the store of the job and ends: {error}\n"
                    + explain({self._rank: take_snapshot()})
                )

    def _watch(self) -> None:
        seen, since, reported = progress(), time.monotonic(), False
        while not self._stopped.wait(self._interval):
            if (now := progress()) != seen:
                seen, since, reported = now, time.monotonic(), False
            if self._answer(self._store.add("rounds", 0)):
                reported = True
            elif not reported and time.monotonic() - since >= self._timeout:
                reported = self._open_round()

    def _answer(self, opened: int) -> bool:
        if opened == self._answered:
            return False
        self._answered = opened
        self._store.set(f"{opened}/{self._rank}", pickle.dumps(take_snapshot()))
        return True

    def _open_round(self) -> bool:
        """Write the report of the next round, unless another rank was first."""
        me = str(self._rank)
        if self._store.compare_set(f"owner/{self._answered}", "", me) != me.encode():
            return False
        current = self._store.add("rounds", 1)
        self._answer(current)
        states = self._collect(current)
        self._report(
            f"rank {self._rank} has not moved for {self._timeout:g} s; the job waits on.\n" + explain(states)
        )
        return True

    def _collect(self, current: int) -> dict[int, RankSnapshot | None]:
        """The snapshots of the ranks that answer soon; the others, dead or stopped, have None."""
        keys = {rank: f"{current}/{rank}" for rank in range(self._world_size)}
        deadline = time.monotonic() + 4 * self._interval
        while time.monotonic() < deadline and not self._store.check(list(keys.values())):
            if self._stopped.wait(self._interval / 4):
                break
        return {
            rank: pickle.loads(self._store.get(key)) if self._store.check([key]) else None
            for rank, key in keys.items()
        }
