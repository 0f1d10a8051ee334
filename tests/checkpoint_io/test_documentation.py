"""checkpoints.md promises that its Python runs, and goes on after a crash; the page of an example, the
numbers it shows.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import colossalai
from colossalai.checkpoint_io import checkpoints
from colossalai.testing import spawn
from tests.examples.scripts import EXAMPLES, run_script

PAGE = Path(__file__).parents[2] / "docs/source/en" / "checkpoints.md"


def _run(rank: int, world_size: int, port: int, folder: Path) -> int:
    os.chdir(folder)
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    block = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    namespace: dict[str, Any] = {"__name__": "documentation"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    return len(checkpoints("runs/demo"))


def test_the_page_runs_and_goes_on(tmp_path: Path) -> None:
    assert spawn(_run, 2, folder=tmp_path) == [4, 4]
    (tmp_path / "runs/demo/last/manifest.json").unlink()  # a save that did not come to its end
    assert spawn(_run, 1, folder=tmp_path) == [
        4
    ]  # from step 20, on fewer ranks: nothing is left to do but the last save


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
