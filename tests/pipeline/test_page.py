"""The Python of docs/source/en/pipeline.md runs on two ranks, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from colossalai.testing import spawn

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "pipeline.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    namespace: dict[str, object] = {"__name__": "documentation"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/pipeline.md", "exec"), namespace)
    return out.getvalue()


def test_the_blocks_run_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, last = spawn(_run, 2)
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    line, rest = first.split("\n", 1)
    assert [f"{line}\n{last}", rest] == shown
    assert {path.name for path in tmp_path.iterdir()} == {"plan.svg", "run.png", "run.json"}
