"""The Python of docs/source/en/colotensor.md runs on 2 and on 4 ranks, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from colossalai.testing import spawn

pytest.importorskip("transformers")

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "colotensor.md").read_text()


def _run(rank: int, world_size: int, port: int) -> str:
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/source/en/colotensor.md", "exec"), namespace)
    return out.getvalue()


@pytest.mark.parametrize("nprocs", [2, 4])
def test_the_blocks_run_one_after_the_other(nprocs: int) -> None:
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert spawn(_run, nprocs)[0] == shown.group(1)
