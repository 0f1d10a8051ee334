"""The Python of docs/source/en/tracing.md runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "tracing.md").read_text()


def test_the_blocks_run_one_after_the_other() -> None:
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/tracing.md", "exec"), namespace)
    shown = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
    assert out.getvalue() == shown
