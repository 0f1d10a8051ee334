"""The Python on the pages about experts, optimizers, states on a disk, and schedulers runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs/source/en"


@pytest.mark.parametrize("page", ["lr_schedulers.md", "moe.md", "nvme.md", "optimizers.md"])
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert blocks
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
