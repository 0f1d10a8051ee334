"""The Python of docs/pipeline_stages.md runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pipeline_stages.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), {"__name__": "page"})
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert expected
        assert capsys.readouterr().out.splitlines() == expected
