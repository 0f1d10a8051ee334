"""What a benchmark reports: our time or memory beside a named peer's, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Row:
    what: str
    ours: float
    peer: float
    peer_name: str
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def milliseconds(work: Callable[[], object], repeat: int = 7, inner: int = 1) -> float:
    """Median time of one call, after one call that warms up."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(inner):
            work()
        times.append((time.perf_counter() - start) * 1000 / inner)
    return median(times)


def show(rows: list[Row]) -> str:
    width = max(len(r.what) for r in rows) + 2
    lines = [f"{'measured':{width}}{'ours':>12}{'peer':>12}{'ours/peer':>11}   peer"]
    for r in rows:
        lines.append(
            f"{r.what:{width}}{r.ours:9.2f} {r.unit}{r.peer:9.2f} {r.unit}{r.ratio:11.2f}   {r.peer_name}"
        )
    return "\n".join(lines)
