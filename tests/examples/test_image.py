"""The image example, small: every plan learns, and a checkpoint of one goes on under another."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import pytest

from colossalai.testing import RankError, spawn

SCRIPT = Path(__file__).parents[2] / "examples" / "image" / "train.py"
SMALL = ["--steps", "1", "--batch_size", "4"]


def _run(rank: int, world_size: int, port: int, folder: Path, options: list[str]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks cannot share a GPU under NCCL
    os.chdir(folder)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [SCRIPT.name, *SMALL, *options])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    if rank == 0:
        (folder / "out").write_text(out.getvalue())


def epochs(folder: Path) -> list[str]:
    return [
        line.split(" - ")[0]
        for line in (folder / "out").read_text().splitlines()
        if " - train loss: " in line
    ]


def test_a_vit_changes_its_plan_between_epochs(tmp_path: Path) -> None:
    options = ["-m", "vit", "--interval", "2", "--epochs"]
    spawn(_run, 2, folder=tmp_path, options=["-p", "torch_fsdp", *options, "2"])
    assert epochs(tmp_path) == ["Epoch 0", "Epoch 1"]
    assert (tmp_path / "checkpoint/vit_1/model.safetensors.index.json").is_file()
    spawn(_run, 1, folder=tmp_path, options=["-p", "torch_ddp", *options, "3", "-r", "1"])
    assert epochs(tmp_path) == ["Epoch 2"]


def test_a_resnet_that_misses_its_target_is_an_error(tmp_path: Path) -> None:
    options = ["-m", "resnet", "--epochs", "1", "--target_acc", "2"]
    with pytest.raises(RankError, match=r"test accuracy .* is below the target of 200.00%"):
        spawn(_run, 1, folder=tmp_path, options=options)
