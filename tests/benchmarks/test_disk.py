"""The benchmark of disks measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import disk


def test_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TOTAL", 5 * disk.SLOT)
    monkeypatch.setattr(disk, "TRIES", 1)
    rows = disk.rows()
    assert [row.what.split(" (")[0] for row in rows[:3]] == [
        "disk, write a new file",
        "disk, write it again",
        "disk, read",
    ]
    assert rows[-1].what == "AdamW, 10M parameters, states on disk"
    assert all(row.ours > 0 and row.peer > 0 for row in rows)
