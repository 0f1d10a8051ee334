"""The Python of docs/source/en/auto_parallel.md runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/source/en" / "auto_parallel.md").read_text()


def test_the_page_shows_what_is_printed() -> None:
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/auto_parallel.md", "exec"), namespace)
    assert out.getvalue() == re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
