"""The Python of docs/source/en/titans.md runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/source/en" / "titans.md"


def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), {})
        printed = capsys.readouterr().out.splitlines()
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert expected
        assert [line for line in printed if line in expected] == expected
