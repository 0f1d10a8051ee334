"""The programs of docs/source/en/fine_tuning.md run as they are printed there, and under other plans."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from colossalai.testing import spawn

pytest.importorskip("transformers", reason="needs `pip install transformers`")

PAGE = Path(__file__).parents[2] / "docs/source/en" / "fine_tuning.md"
PLANS = ("zero2", "fsdp", "gemini")  # the first is that of the page


def programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_program(rank: int, world_size: int, port: int, program: str, folder: str) -> None:
    os.chdir(folder)
    with open(f"out{rank}", "w") as file, contextlib.redirect_stdout(file):
        exec(compile(program, "the program", "exec"), {"__name__": "program"})


def test_a_model_is_opened_trained_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, train, look = programs(PAGE)
    monkeypatch.chdir(tmp_path)
    exec(compile(make, str(PAGE), "exec"), {})
    for plan in PLANS:
        program = train.replace(f'plugin="{PLANS[0]}"', f'plugin="{plan}"')
        assert f'plugin="{plan}"' in program
        spawn(run_program, 2, program=program, folder=str(tmp_path))
        losses = [float(line.split()[-1]) for line in (tmp_path / "out0").read_text().splitlines()]
        assert len(losses) == 3
        assert losses[-1] < 0.7 * losses[0], plan
        assert (tmp_path / "out1").read_text() == ""
        capsys.readouterr()
        exec(compile(look, str(PAGE), "exec"), {})
        assert capsys.readouterr().out.startswith("the quick brown "), plan
        (tmp_path / "tuned").rename(tmp_path / plan)
