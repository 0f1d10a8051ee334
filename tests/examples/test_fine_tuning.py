"""The programs of fine_tuning.md run under other plans than that of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from docs.pages import ENGLISH, Page
from docs.test import run

pytest.importorskip("transformers", reason="needs `pip install transformers`")

PAGE = Page.read(ENGLISH / "fine_tuning.md")


@pytest.mark.parametrize("plan", ["fsdp", "gemini"])
def test_a_model_is_opened_trained_and_written(plan: str, tmp_path: Path) -> None:
    assert 'plugin="zero2"' in PAGE.text
    other = PAGE.text.replace('plugin="zero2"', f'plugin="{plan}"').replace('title="Output"', "")
    printed = run(replace(PAGE, text=other), tmp_path)
    first, _, final, right, text = printed.splitlines()
    assert float(final.split()[-1]) < 0.7 * float(first.split()[-1])
    assert right.endswith("most of them right: True")
    assert text.startswith("the quick brown ")
