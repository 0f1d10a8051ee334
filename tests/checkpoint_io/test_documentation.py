"""docs/checkpoints.md promises that its Python runs, and goes on after a crash."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import colossalai
from colossalai.checkpoint_io import checkpoints
from colossalai.testing import spawn

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def _run(rank: int, world_size: int, port: int, folder: Path) -> int:
    os.chdir(folder)
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "documentation"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    return len(checkpoints("runs/demo"))


def test_the_page_runs_and_goes_on(tmp_path: Path) -> None:
    assert spawn(_run, 2, folder=tmp_path) == [4, 4]
    (tmp_path / "runs/demo/last/manifest.json").unlink()  # a save that did not come to its end
    assert spawn(_run, 1, folder=tmp_path) == [
        4
    ]  # from step 20, on fewer ranks: nothing is left to do but the last save
