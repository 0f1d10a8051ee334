"""The page of the example that resumes shows numbers that are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, run_script


def _losses(text: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)
    }


def test_the_numbers_of_the_resumed_run_are_true(tmp_path: Path) -> None:
    page = (EXAMPLES / "features" / "resume" / "README.md").read_text()
    shown = _losses(page)
    assert len(shown) == 4
    (options,) = re.findall(r"resume/train\.py (.*)", page)
    made = _losses(run_script("features/resume/train.py", "--folder", tmp_path, *options.split(), nprocs=2))
    assert {step: made[step] for step in shown} == pytest.approx(shown, abs=1e-5)
