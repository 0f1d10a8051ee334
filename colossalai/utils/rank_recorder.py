"""``recorder``: when named parts of a script began and ended on each rank, as a trace that browsers show.

A pipeline records its passes by itself; see ``colossalai.pipeline.record_run``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class RecordedSpan(NamedTuple):
    """A part of the script on a rank; times are seconds since 1970."""

    name: str
    rank: int
    start: float
    end: float


class RankRecorder:
    """``with recorder("load", rank): ...`` notes the time of a block; ``save`` writes a file for each
    process.
    """

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    @contextmanager
    def __call__(self, record_name: str, current_rank: int) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.spans.append(RecordedSpan(record_name, current_rank, start, time.time()))

    def save(self, path: str | Path) -> None:
        """Write the spans in the trace format of Chrome and Perfetto."""
        events = [
            {
                "name": span.name,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "pid": span.rank,
                "tid": 0,
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


recorder = RankRecorder()
