"""docs/source/en/utilities.md promises that its Python runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import colossalai
from colossalai.testing import spawn

PAGE = Path(__file__).parents[2] / "docs/source/en" / "utilities.md"


def _run(rank: int, world_size: int, port: int, folder: str) -> None:
    os.chdir(folder)
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 9
    namespace = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    assert "only in the file" in Path("logs", f"rank_{rank}_train.log").read_text()


def test_the_page_runs(tmp_path: Path) -> None:
    spawn(_run, 2, folder=str(tmp_path))
