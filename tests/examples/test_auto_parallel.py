"""The programs of the tutorial about activation checkpointing print what its page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import run_script


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
