"""The training script of README.md runs as it is printed there, as a job of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.tools import ROOT, free_port, run

# The main thread keeps the interpreter to itself, so what other threads hold at the end is still held.
SELFISH = "import sys; sys.setswitchinterval(1000)\n"


def test_the_training_script_ends_well(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "booster.save_model" in script
    (tmp_path / "train.py").write_text(SELFISH + script)
    result = run("run", "--nproc_per_node", 2, "--master_port", free_port(), "train.py", cwd=tmp_path)
    assert result.code == 0, result
    assert "terminate called" not in result.err
    assert (tmp_path / "checkpoint" / "pytorch_model.bin.index.json").exists()
