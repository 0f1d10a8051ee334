"""The programs of docs/source/en/quickstart.md run as they are printed there."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from colossalai.testing import spawn

PAGE = Path(__file__).parents[2] / "docs/source/en" / "quickstart.md"


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run_program(rank: int, world_size: int, port: int, program: str, folder: str) -> None:
    os.chdir(folder)
    with open(f"out{rank}", "w") as file, contextlib.redirect_stdout(file):
        exec(compile(program, str(PAGE), "exec"), {})


def test_the_training_script_on_two_ranks(tmp_path: Path) -> None:
    script = programs()[0]
    assert "TorchDDPPlugin()" in script
    spawn(run_program, 2, program=script, folder=str(tmp_path))
    losses = [float(line.split()[-1]) for line in (tmp_path / "out0").read_text().splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 5
    assert (tmp_path / "out1").read_text() == ""
    assert list((tmp_path / "checkpoint").iterdir())


def test_the_gpt_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    snippet = programs()[1]
    exec(compile(snippet, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == re.search(r"print\(.*# (\d+)", snippet).group(1) + "\n"  # type: ignore[union-attr]


def test_every_program_is_tested() -> None:
    assert len(programs()) == 2
