"""One plan after the other, each on fresh processes, while the terminal shows how far it is.

Processes are forked from a server that has imported everything, so fresh ones cost a fraction of a second; in
return no plan finds memory, caches or a broken connection that another left behind.  A plan that fails says
why, and the next begins.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from colossalai.cli.benchmark.measure import Measurement, Request, measure
from colossalai.cli.benchmark.plans import BenchmarkPlan
from colossalai.testing import RankError, spawn


@dataclass(frozen=True)
class BenchmarkOutcome:
    """The result of one plan, or the reason why there is none."""

    plan: BenchmarkPlan
    result: Measurement | None = None
    error: str | None = None


def run_plan(plan: BenchmarkPlan, request: Request, timeout: float) -> BenchmarkOutcome:
    """Measure ``plan``; of several ranks the slowest and the fullest counts."""
    with tempfile.TemporaryDirectory(prefix="colossalai-benchmark-") as folder, _gpus_hidden(request.device):
        ticks = Path(folder) / "ticks"
        ticks.touch()
        with _progress(ticks, request.steps):
            try:
                found = spawn(
                    measure, plan.size, timeout=timeout, plan=plan, request=request, ticks=str(ticks)
                )
            except RankError as error:
                return BenchmarkOutcome(plan, error=str(error).partition("\n")[0])
    return BenchmarkOutcome(plan, result=_worst(found))


def _worst(found: list[Measurement]) -> Measurement:
    return Measurement(
        forward=max(r.forward for r in found),
        backward=max(r.backward for r in found),
        allocated=max(r.allocated for r in found),
        cached=max((r.cached for r in found if r.cached is not None), default=None),
        sent_forward=max(r.sent_forward for r in found),
        sent_backward=max(r.sent_backward for r in found),
    )


@contextlib.contextmanager
def _gpus_hidden(device: str) -> Iterator[None]:
    """With ``cpu``, processes that are started here see no GPU: layers would choose it."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if device == "cpu":
        os.environ[name] = ""
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif device == "cpu":
            del os.environ[name]


@contextlib.contextmanager
def _progress(ticks: Path, steps: int, every: float = 0.2) -> Iterator[None]:
    """A bar over the steps that rank 0 has noted in ``ticks``; nothing where no terminal is."""
    if not sys.stderr.isatty():
        yield
        return
    bar, done = tqdm(total=steps, unit="step", leave=False), threading.Event()

    def follow() -> None:
        while not done.wait(every):
            bar.n = ticks.stat().st_size
            bar.refresh()

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        bar.close()
