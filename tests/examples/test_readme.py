"""The training script of README.md runs as printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from colossalai.testing import spawn

README = (Path(__file__).parents[2] / "README.md").read_text()


def _run(rank: int, world_size: int, port: int, script: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(script, "README.md", "exec"), {})


def test_the_training_script_on_two_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    spawn(_run, 2, script=script, folder=str(tmp_path))
    assert list((tmp_path / "checkpoint").iterdir())
