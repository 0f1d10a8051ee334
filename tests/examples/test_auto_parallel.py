"""The programs of the tutorial about automatic parallelism print what its page shows."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.scripts import run_script

FOLDER = Path(__file__).parents[2] / "examples/tutorial/auto_parallel"


def test_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--model", "gpt2", "--batch_size", 1, "--budgets", 3, "--device", "predict:a100")
    text = run_script("tutorial/auto_parallel/auto_ckpt_solver_test.py", *options)
    assert "==============benchmark summary==============\n" in text
    line = r"memory budget: (\S+) MB, peak memory: (\S+) MB, step time: (\S+) MS\n"
    found = [tuple(map(float, groups)) for groups in re.findall(line, text)]
    assert len(found) == 3
    assert all(peak <= budget for budget, peak, _ in found)
    assert found[0][2] > found[-1][2]
    assert (tmp_path / "gpt2_benchmark.png").stat().st_size > 1000


def test_batch_sizes() -> None:
    options = ("--model", "resnet50", "--memory", "3 GiB", "--batch_sizes", 32, 4096)
    text = run_script("tutorial/auto_parallel/auto_ckpt_batchsize_test.py", *options)
    assert "===============benchmark summary================\n" in text
    assert re.search(r"batch_size: 32, peak memory: \S+ MB, through put: \S+ images/s\n", text)
    assert re.search(r"batch_size: 4096, .* is below the least", text)


SOLVER, BATCHES = "auto_ckpt_solver_test.py", "auto_ckpt_batchsize_test.py"


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (SOLVER, ("--batch_size", 0), "argument --batch_size: expected a whole number, at least 1, got '0'"),
        (SOLVER, ("--budgets", -3), "argument --budgets: expected a whole number, at least 1, got '-3'"),
        (SOLVER, ("--device", "predict:foo"), "argument --device: there is no device 'foo'; there are"),
        (SOLVER, ("--device", "cuda"), "argument --device: cuda needs a GPU, and there is none"),
        (BATCHES, ("--batch_sizes", 32, 0), "argument --batch_sizes: expected a whole number"),
        (BATCHES, ("--memory", "foo"), "argument --memory: a size is a number of bytes"),
        ("auto_parallel_with_resnet.py", ("--batch_size", 0), "argument --batch_size: expected a whole"),
    ],
)
def test_options_that_are_refused(
    program: str,
    options: tuple[Any, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [program, *map(str, options)])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(FOLDER / program), run_name="__main__")
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    assert message in capsys.readouterr().err


def test_help_tells_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [SOLVER, "--help"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(FOLDER / SOLVER), run_name="__main__")
    monkeypatch.delitem(sys.modules, "parts", raising=False)
    assert "(predict:h200)" in capsys.readouterr().out


def test_resnet() -> None:
    """A line per operation, and what page 49 shows of epochs."""
    options = ("-s", "--model", "resnet18", "--batch_size", 8, "--steps", 2, "--epochs", 2)
    text = run_script("tutorial/auto_parallel/auto_parallel_with_resnet.py", *options, nprocs=4)
    assert re.search(r"^layer1_0_conv1 \S+ = \S+ X \S+$", text, re.MULTILINE)
    number = r"\d\S*"
    line = rf"Epoch (\d) - train loss: {number}, test loss: {number}, acc: {number}, lr: {number}$"
    assert re.findall(line, text, re.MULTILINE) == ["0", "1"]


def test_gpt() -> None:
    pytest.importorskip("transformers")
    options = ("--tiny", "--layers", 1, "--steps", 3, "--mesh", 1, 2)
    text = run_script("language/gpt/experiments/auto_parallel/auto_parallel_with_gpt.py", *options, nprocs=2)
    assert re.search(r"^transformer_h_0_mlp_c_fc +\S+ = \S+ X \S+ ", text, re.MULTILINE)
    assert "mesh 1 x 2: " in text
    losses = [float(n) for n in re.findall(r"step \d: loss (\S+), gradient norm", text)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
