"""The file that runs the user's script, started as torchrun starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colossalai.cli import _rank


def run_rank(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    (folder / "script.py").write_text(script)
    env = {**os.environ, _rank.FAILURE_DIR: str(folder), "RANK": "3", "LOCAL_RANK": "1"}
    command = [sys.executable, "-u", _rank.__file__, str(os.getpid()), "script.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    note = folder / "rank_3.json"
    return done, json.loads(note.read_text()) if note.exists() else None


WITH_TORCH = """
import sys
sys.excepthook = lambda *args: print("told")
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=0, world_size=1)
raise ValueError("boom")
"""


@pytest.mark.parametrize(
    ("script", "out"),
    [
        ("raise ValueError('boom')", ""),
        ("import sys\nsys.excepthook = lambda *args: print('told')\nraise ValueError('boom')", "told\n"),
        (WITH_TORCH, "told\n"),  # torch wraps the hook and prints what it says, with the rank in front
    ],
)
def test_exception_goes_into_the_note(tmp_path: Path, script: str, out: str) -> None:
    done, note = run_rank(tmp_path, script)
    assert (done.returncode, done.stdout) == (1, out)
    assert "Traceback" not in done.stderr
    assert note is not None
    assert (note["rank"], note["local_rank"], note["kind"], note["exitcode"]) == (3, 1, "raised", 1)
    assert note["summary"] == "ValueError: boom"
    assert note["traceback"].startswith('Traceback (most recent call last):\n  File "')
    assert "_rank.py" not in note["traceback"]


def test_syntax_error(tmp_path: Path) -> None:
    done, note = run_rank(tmp_path, "x = (\n")
    assert done.returncode == 1
    assert note is not None
    assert f'File "{tmp_path}/script.py", line 1' in note["traceback"]
    assert "_rank.py" not in note["traceback"]


@pytest.mark.parametrize(
    ("code", "exitcode", "summary"),
    [
        ("None", 0, None),
        ("0", 0, None),
        ("3", 3, "the script called sys.exit(3)"),
        ("'no data'", 1, "the script called sys.exit('no data')"),
    ],
)
def test_sys_exit(tmp_path: Path, code: str, exitcode: int, summary: str | None) -> None:
    done, note = run_rank(tmp_path, f"import sys; print('here'); sys.exit({code})")
    assert (done.returncode, done.stdout) == (exitcode, "here\n")
    assert (note and note["summary"]) == summary
    assert ("no data" in done.stderr) == ("no data" in code)


def test_interrupted(tmp_path: Path) -> None:
    done, note = run_rank(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == -2
    assert done.stderr == ""
    assert note is not None
    assert note["kind"] == "stopped"


def test_earlier_note_is_forgotten(tmp_path: Path) -> None:
    """torchrun restarted the rank."""
    (tmp_path / "rank_3.json").write_text("{}")
    done, note = run_rank(tmp_path, "print('better')")
    assert (done.returncode, note) == (0, None)


def test_parent_is_gone_already(tmp_path: Path) -> None:
    env = {**os.environ, _rank.FAILURE_DIR: str(tmp_path), "RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, _rank.__file__, "-1", "script.py"]
    assert subprocess.run(command, env=env, timeout=60).returncode == -9
