"""The Python of docs/source/en/large_models.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colossalai.mesh.deferred import recording_in
from colossalai.testing import spawn

PAGE = (Path(__file__).parents[2] / "docs/source/en" / "large_models.md").read_text()

pytest.importorskip("transformers", reason="needs `pip install transformers`")


def _run(rank: int, world_size: int, port: int) -> bool:
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/source/en/large_models.md", "exec"), namespace)
    return recording_in(namespace["model"]) is not None  # type: ignore[arg-type]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spawn(_run, 1) == [True]
