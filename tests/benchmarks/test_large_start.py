"""The benchmark of large starts runs, with a toy."""

from __future__ import annotations

import pytest

from colossalai.testing import spawn

pytest.importorskip("transformers", reason="needs `pip install transformers`")

from benchmarks import large_start


def _start(rank: int, world_size: int, port: int) -> large_start.Report:
    return large_start.run(large_start.TOY, length=16)


def test_a_toy_starts_and_trains() -> None:
    (report,) = spawn(_start, 1)
    assert list(report.phases)[:4] == ["import, launch", "build without memory", "boost", "first step"]
    assert report.losses[-1] < report.losses[0]
    assert report.on_device == report.parameters > 0
    assert "of at most 60" in str(report)
