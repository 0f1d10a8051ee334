"""The demo, small: trained through ``colossalai run``, resumed, interrupted, sampled from."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.testing import RankError, free_port, spawn
from tests.checkpoint_io.families import stored_tensors

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
sys.path.insert(0, str(DEMO))  # the example's modules import each other as scripts do

import report  # noqa: E402
import train  # noqa: E402

TINY = ["--text-bytes", "200000", "--batch-size", "4", "--time-limit", "0"]
SHAPE = ["--seq-len", "16", "--hidden", "16", "--layers", "1", "--heads", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six steps on two ranks, as a user starts them; the folder and what was printed."""
    out = tmp_path_factory.mktemp("demo")
    command = [
        sys.executable,
        "-m",
        "colossalai",
        "run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command += [str(DEMO / "train.py"), "--steps", "6", "--out", str(out), *TINY, *SHAPE]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",  # two ranks cannot share a GPU under NCCL
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=out, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.fixture
def copy(trained: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if kind in record]


def test_it_tells_what_it_does(trained: tuple[Path, str]) -> None:
    out, stdout = trained
    for expected in (
        "data parallel on 2 x ",
        "step     0   validation loss 6.9",
        "step     6/6   train loss ",
        "validation loss from ",
        "\n    def __init__(self",
        "\ndef read_lines(",
        str(out / "loss.png"),
        "What to try next",
    ):
        assert expected in stdout
    assert stdout.count("plan:") == 1, "only rank 0 talks"


def test_it_leaves_numbers_a_picture_and_a_checkpoint(trained: tuple[Path, str]) -> None:
    out, _ = trained
    assert [r["step"] for r in records(out, "train_loss")] == [1, 2, 3, 4, 5, 6]
    validation = records(out, "validation_loss")
    assert [r["step"] for r in validation] == [0, 1, 2, 3, 4, 5, 6]
    assert validation[0]["validation_loss"] == pytest.approx(math.log(1024), abs=0.05)
    assert validation[-1]["validation_loss"] < validation[0]["validation_loss"]
    picture = (out / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert list((out / "checkpoint").glob("*.safetensors"))
    assert json.loads((out / "checkpoint" / "demo.json").read_text())["step"] == 6


def run_demo(rank: int, world_size: int, port: int, argv: list[str], interrupt_at: int = 0) -> None:
    """``main`` on a rank that already exists; rank 1 gets Ctrl-C while it computes step ``interrupt_at``."""
    sys.argv = ["train.py", *argv]
    step = train.Demo.train_step

    def interrupted(self: train.Demo, batch: torch.Tensor) -> float:
        if rank == 1 and self.step + 1 == interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch)

    train.Demo.train_step = interrupted  # type: ignore[method-assign]
    if not interrupt_at:
        train.main()
        return
    with pytest.raises(SystemExit) as exit_code:
        train.main()
    assert exit_code.value.code == 130


def test_resume_goes_on_from_the_step(copy: Path) -> None:
    before = records(copy, "train_loss")
    spawn(run_demo, 2, argv=["--resume", "--steps", "9", "--out", str(copy), *TINY])
    after = records(copy, "train_loss")
    assert after[:6] == before
    assert [r["step"] for r in after[6:]] == [7, 8, 9]
    state = json.loads((copy / "checkpoint" / "demo.json").read_text())
    assert state["step"] == 9
    assert state["shape"] == {"seq_len": 16, "hidden": 16, "layers": 1, "heads": 2}
    states = [value for name, value in stored_tensors(copy / "checkpoint") if name.endswith("/step")]
    assert {int(value) for value in states} == {9}


def test_ctrl_c_on_one_rank_stops_all_and_saves(tmp_path: Path) -> None:
    spawn(run_demo, 2, argv=["--steps", "500", "--out", str(tmp_path), *TINY, *SHAPE], interrupt_at=4)
    assert [r["step"] for r in records(tmp_path, "train_loss")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "checkpoint" / "demo.json").read_text())["step"] == 4
    assert (tmp_path / "loss.png").is_file()
    assert any(name.startswith("optimizer/") for name, _ in stored_tensors(tmp_path / "checkpoint"))


def test_a_resumed_training_equals_one_without_a_break(tmp_path: Path) -> None:
    """Stopped after 4 of 8 steps and resumed, as it says to: weights as if nothing had happened."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ["--steps", "8", *TINY, "--out"]
    spawn(run_demo, 2, argv=[*options, str(whole), *SHAPE])
    spawn(run_demo, 2, argv=[*options, str(broken), *SHAPE], interrupt_at=4)
    spawn(run_demo, 2, argv=["--out", str(broken), "--resume"])
    assert records(broken, "train_loss") == records(whole, "train_loss")


def test_too_little_text_is_refused_on_every_rank(tmp_path: Path) -> None:
    argv = ["--text-bytes", "20000", "--batch-size", "500", "--out", str(tmp_path)]
    with pytest.raises(
        RankError, match=r"windows of text are too few for 2 x 500 per step; lower --batch-size"
    ):
        spawn(run_demo, 2, argv=argv)


def call(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    train.main()


def test_sample_only_continues_the_prompt(
    trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--sample-only", "import os", "--out", str(trained[0]))
    first = capsys.readouterr().out
    assert first.startswith("import os")
    assert len(first) > 100
    call(monkeypatch, "--sample-only", "import os", "--out", str(trained[0]))
    assert capsys.readouterr().out == first
    call(monkeypatch, "--sample-only", "import os", "--out", str(trained[0]), "--seed", "7")
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], r"--steps: '0' is not a number of at least 1"),
        (["--hidden", "30", "--heads", "4"], r"--hidden 30 is not divisible by --heads 4"),
        (["--seq-len", "1"], r"--seq-len must be at least 2"),
        (
            ["--resume", "--out", "/nonexistent"],
            r"there is no checkpoint in /nonexistent; train without --resume",
        ),
        (["--resume", "--hidden", "32"], r"has --hidden 16, not 32; leave --hidden out"),
        (["--resume", "--steps", "6"], r"at step 6 already; pass a higher --steps"),
        (["--lr", "0"], r"--lr must be above 0 .* got 0\.0 and 75\.0"),
        (["--time-limit", "-1"], r"--time-limit not below, got 0\.003 and -1\.0"),
        (["--sample-only", ""], r"needs a prompt of at least one letter"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    trained: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        call(monkeypatch, "--out", str(trained[0]), *argv)
    assert exit_code.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_schedule_warms_up_and_decays() -> None:
    schedule = train.Schedule(steps=100, seconds=0)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def test_schedule_fits_a_slow_machine() -> None:
    schedule = train.Schedule(steps=1000, seconds=60, first_step=100)
    schedule.update(105, elapsed=5.0)  # too early to judge
    assert schedule.end == 1000
    schedule.update(120, elapsed=10.0)  # 0.5 s per step: 120 steps fit
    assert schedule.end == 220
    assert schedule.factor(220) == pytest.approx(0.1)
    schedule.update(300, elapsed=61.0)  # never in the past
    assert schedule.end == 300
    schedule.update(700, elapsed=30.0)  # it was only a moment
    assert schedule.end == 1000
    unlimited = train.Schedule(steps=1000, seconds=0)
    unlimited.update(500, elapsed=1e6)
    assert unlimited.end == 1000


def test_the_end_does_not_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    assert "pip install matplotlib" in train.Demo.draw(None)  # type: ignore[arg-type]


def test_commands_are_told_as_they_must_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "colossalai").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    assert train.tool("colossalai") == ".venv/bin/colossalai"
    monkeypatch.setenv("PATH", str(binaries))
    assert train.tool("colossalai") == "colossalai"
    assert train.tool("unheard-of") == "unheard-of"


def test_unigram_entropy() -> None:
    assert report.unigram_entropy(torch.tensor([0, 1, 2, 3])) == pytest.approx(math.log(4))
    assert report.unigram_entropy(torch.tensor([5, 5, 5])) == 0


def test_smoothing_starts_at_the_first_value() -> None:
    assert report.smooth([4.0, 4.0, 4.0]) == pytest.approx([4, 4, 4])
    assert report.smooth([1.0, 2.0], weight=0.5) == pytest.approx([1, 5 / 3])
