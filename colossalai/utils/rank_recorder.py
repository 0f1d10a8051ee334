"""``recorder``: what each rank did when, for one picture of all ranks.

    with recorder("forward", rank):
        ...
    recorder.dump_record("records")  # records/rank_0.json on rank 0, to be opened in Perfetto

A device may still be computing when a block ends, so the recorder waits for it; a pipeline has its own
recordings, without waits (``colossalai.pipeline.recording``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from colossalai.utils.device import synchronize


class RankRecord(NamedTuple):
    """One block of code on one rank, in seconds since the epoch, so that ranks can be compared."""

    name: str
    rank: int
    start: float
    end: float


class RankRecorder:
    """Collects the records of this process."""

    def __init__(self) -> None:
        self.records: list[RankRecord] = []

    @contextmanager
    def __call__(self, record_name: str, current_rank: int) -> Iterator[RankRecorder]:
        """Record the block as ``record_name``."""
        synchronize()
        start = time.time()
        try:
            yield self
        finally:
            synchronize()
            self.records.append(RankRecord(record_name, current_rank, start, time.time()))

    def dump_record(self, folder: str | Path = "records") -> Path | None:
        """Write the records as a trace of Chrome, in a file for this rank; nothing if there are none."""
        if not self.records:
            return None
        events = [
            {"name": r.name, "ph": "X", "pid": r.rank, "tid": 0, "ts": r.start * 1e6, "dur": seconds * 1e6}
            for r in self.records
            for seconds in (r.end - r.start,)
        ]
        path = Path(folder) / f"rank_{self.records[0].rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    def reset(self) -> None:
        self.records.clear()


recorder = RankRecorder()

__all__ = ["RankRecord", "RankRecorder", "recorder"]
