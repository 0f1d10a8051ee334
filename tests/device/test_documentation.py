"""The Python of docs/source/en/costs.md runs on 4 ranks, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from colossalai.testing import spawn

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "costs.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/costs.md", "exec"), namespace)
    return out.getvalue()


def test_the_blocks_run_one_after_the_other() -> None:
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[-1]
    assert spawn(_run, 4)[0] == shown
