"""The Python of docs/source/en/layout.md runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from colossalai.testing import spawn
from tests.mesh.world import start

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "layout.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    start(rank, world_size, port)
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/layout.md", "exec"), namespace)
    return out.getvalue()


def test_the_blocks_run_one_after_the_other_on_eight_ranks() -> None:
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert spawn(_run, 8)[0] == shown.group(1)
