"""The Python of docs/source/en/tensor_parallel.md runs on four ranks, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from colossalai.testing import spawn

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "tensor_parallel.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    namespace: dict[str, object] = {"__name__": "documentation"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/tensor_parallel.md", "exec"), namespace)
    return out.getvalue()


def test_the_blocks_run_one_after_the_other_on_four_ranks() -> None:
    assert spawn(_run, 4)[0] == "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
