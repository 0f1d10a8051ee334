"""The scripts of README.md end well, and equal one process; tests/documents runs all of them."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.testing import spawn
from docs.pages import Page
from tests.cli.tools import ROOT, free_port, run

# The main thread keeps the interpreter to itself, so what other threads hold at the end is still held.
SELFISH = "import sys; sys.setswitchinterval(1000)\n"


def scripts() -> dict[str, str]:
    """The scripts by their names."""
    return Page.read(ROOT / "README.md").files()


def _run(rank: int, world_size: int, port: int, script: str, folder: Path) -> dict[str, Any]:
    """What the script knows at its end of its loss, and what it has printed."""
    os.chdir(folder)
    torch.set_num_threads(1)
    # ranks may have to share one GPU, which NCCL does not allow
    colossalai.launch_from_torch = partial(colossalai.launch_from_torch, backend="gloo", verbose=False)
    names: dict[str, Any] = {"__name__": "__main__"}
    said = StringIO()
    with redirect_stdout(said):
        exec(compile(script, "README.md", "exec"), names)
    loss = names.get("loss")
    return {
        "loss": None if loss is None else loss.item(),
        "said": said.getvalue().splitlines(),
    }


def test_every_script_is_tested() -> None:
    assert list(scripts()) == ["train.py", "hybrid.py", "large.py", "resume.py"]


def test_the_training_script_ends_well(tmp_path: Path) -> None:
    script = scripts()["train.py"] + 'booster.save("checkpoint")\n'
    (tmp_path / "train.py").write_text(SELFISH + script)
    result = run("run", "--nproc_per_node", 2, "--master_port", free_port(), "train.py", cwd=tmp_path)
    assert result.code == 0, result
    assert "terminate called" not in result.err
    assert (tmp_path / "checkpoint" / "manifest.json").exists()
    assert len(re.findall(r"(?m)^epoch \d+: loss \d+\.\d+$", result.out)) == 3  # by one rank


def test_the_hybrid_script_has_the_losses_of_one_process(tmp_path: Path) -> None:
    script = scripts()["hybrid.py"]
    ends = spawn(_run, 4, script=script, folder=tmp_path)
    losses = [end["loss"] for end in ends]
    assert [len(end["said"]) for end in ends] == [0, 0, 0, 3]
    assert ends[3]["said"][2] == f"step 2: loss {losses[3]:.4f}"
    assert losses[:2] == [None, None], "the first stage has no loss"
    assert losses[2] == losses[3]
    (alone,) = spawn(_run, 1, script=re.sub("plan = .*", "plan = dict()", script), folder=tmp_path)
    assert losses[2] == pytest.approx(alone["loss"], rel=1e-5)
    assert len(alone["said"]) == 3
