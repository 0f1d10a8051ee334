"""One plan after the other, each on fresh processes, while the terminal shows how far it is.

Processes are forked from a server that has imported everything, so fresh ones cost a fraction of a second; in
return no plan finds memory, caches or a broken connection that another left behind.  A plan that fails says
why, and the next begins.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from colossalai.cli.benchmark.measure import Measurement, MeasureRequest, measure
from colossalai.cli.benchmark.plans import BenchmarkPlan
from colossalai.cli.spawned import gpus_hidden, progress
from colossalai.testing import RankError, spawn


@dataclass(frozen=True)
class BenchmarkOutcome:
    """The result of one plan, or the reason why there is none."""

    plan: BenchmarkPlan
    result: Measurement | None = None
    error: str | None = None


def run_plan(plan: BenchmarkPlan, request: MeasureRequest, timeout: float) -> BenchmarkOutcome:
    """Measure ``plan``; of several ranks the slowest and the fullest counts."""
    with tempfile.TemporaryDirectory(prefix="colossalai-benchmark-") as folder, gpus_hidden(request.device):
        ticks = Path(folder) / "ticks"
        ticks.touch()
        with progress(ticks, request.steps):
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
