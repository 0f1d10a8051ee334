"""What the timeline of a step says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zero.gemini.runs import Case, Training, batch


def test_a_step_is_seen(tmp_path: Path) -> None:
    run = Training(Case(early=True, share=0.5))
    timeline = run.model.gemini_manager.timeline
    with pytest.raises(RuntimeError, match="train two steps first"):
        timeline.numbers()
    for step in range(4):
        run.step(batch(step))
    run.model.settle()
    chunks = run.model.chunk_manager.chunks
    numbers = timeline.numbers()
    weights = sum(c.shard_nbytes for c in chunks)
    assert numbers.bytes_up >= weights  # every chunk comes at least once
    assert numbers.bytes_down >= sum(c.shard_nbytes for c in chunks if c.trained) * 0.9
    assert 0 < numbers.updating <= numbers.seconds * 2
    assert numbers.hidden is None  # without a device nothing is timed
    present = timeline.intervals("present")
    assert (
        present.keys()
        == {c.index for c in chunks if any(s.name != "unused.weight" for s in c.slots)} & present.keys()
    )
    assert all(0 <= a <= b <= numbers.seconds for spans in present.values() for a, b in spans)
    table = timeline.table()
    assert all(chunk.slots[0].name in table for chunk in chunks)
    assert "MB to the compute tier" in table
    assert timeline.picture(tmp_path / "step.png").stat().st_size > 10_000


def test_nothing_moves_when_everything_rests_on_the_device() -> None:
    run = Training(Case("auto"))
    for step in range(4):
        run.step(batch(step))
    numbers = run.model.gemini_manager.timeline.numbers()
    assert (numbers.bytes_up, numbers.bytes_down, numbers.updating) == (0, 0, 0)
