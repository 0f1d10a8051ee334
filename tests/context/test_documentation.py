"""The Python in our pages runs, and prints what the pages say."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from colossalai.core import global_context as gpc
from colossalai.testing import spawn

DOCS = Path(__file__).parents[2] / "docs/source/en"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", flags=re.DOTALL)


def _run(rank: int, world_size: int, port: int, page: str, config: str) -> None:
    arguments = f"--config {config} --host localhost --port {port} --world_size {world_size} --rank {rank}"
    sys.argv = ["train.py", *arguments.split()]
    namespace = {"__name__": "documentation"}
    for code, expected in BLOCK.findall((DOCS / page).read_text()):
        if "launch" in code and "destroy" not in code:
            gpc.destroy()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), namespace)
        assert not expected or printed.getvalue() == expected


@pytest.mark.parametrize(
    ("page", "blocks"), [("launch.md", 3), ("configuration.md", 5), ("parallel_context.md", 4)]
)
def test_a_page(page: str, blocks: int, tmp_path: Path) -> None:
    assert len(BLOCK.findall((DOCS / page).read_text())) == blocks
    (tmp_path / "config.py").write_text("BATCH_SIZE = 32\n")
    spawn(_run, 2, page=page, config=str(tmp_path / "config.py"))
