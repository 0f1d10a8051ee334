"""docs/booster.md promises that its Python runs, and that its plugin is equal to the serial model."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import colossalai
from colossalai.testing import spawn
from colossalai.testing.parity import check_plan
from tests.booster.plans import PluginRun, problem

PAGE = Path(__file__).parents[2] / "docs" / "booster.md"


def _run(rank: int, world_size: int, port: int, folder: Path) -> None:
    os.chdir(folder)
    # two ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
    assert namespace["optimizer"].param_groups[0]["lr"] < 1e-2
    assert (folder / "checkpoint/model/model.safetensors.index.json").is_file()
    check_plan(problem(), lambda made: PluginRun(made, namespace["AveragingPlugin"]()))


def test_the_page_runs(tmp_path: Path) -> None:
    spawn(_run, 2, folder=tmp_path)
