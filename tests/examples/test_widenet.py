"""WideNet on digits: one curve for every number of processes, and for every way to share the experts out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, changed_config, run_script

pytest.importorskip("sklearn")

FOLDER = EXAMPLES / "image" / "widenet"
SHARED = "parallel = dict(moe=dict(size=MOE_MODEL_PARALLEL_SIZE))"


def first_epoch(tmp_path: Path, ranks: int, *changes: tuple[str, str]) -> list[float]:
    """The loss and the accuracy of a training of one epoch."""
    short = (("NUM_EPOCHS = 15", "NUM_EPOCHS = 1"), ("WARMUP_EPOCHS = 2", "WARMUP_EPOCHS = 0"))
    config = changed_config(FOLDER, tmp_path / "config.py", *short, *changes)
    shown = run_script("image/widenet/train.py", "--config", config, data=tmp_path, nprocs=ranks)
    (found,) = re.findall(r"epoch 1: loss ([\d.]+), test accuracy ([\d.]+)", shown)
    return [float(number) for number in found]


def test_one_curve_on_one_two_and_four_processes(tmp_path: Path) -> None:
    loss, right = alone = first_epoch(tmp_path, 1)
    assert loss < 2
    assert right > 0.5
    for ranks in (2, 4):
        assert first_epoch(tmp_path, ranks) == pytest.approx(alone, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ("parallel = dict(moe=dict(size=2))", 4),
        ("parallel = dict(moe=2, tensor=dict(size=2, mode='1d'))", 4),
        ("parallel = dict(moe=2, sequence=2)", 4),
        ("parallel = dict(moe=1)", 2),
    ],
)
def test_one_curve_under_every_plan(parallel: str, ranks: int, tmp_path: Path) -> None:
    alone = first_epoch(tmp_path, 1)
    assert first_epoch(tmp_path, ranks, (SHARED, parallel)) == pytest.approx(alone, abs=2e-6)


@pytest.mark.slow
def test_the_accuracy_of_the_page(tmp_path: Path) -> None:
    shown = run_script("image/widenet/train.py", data=tmp_path)
    (page,) = re.findall(
        r"epoch 15: loss ([\d.]+), test accuracy ([\d.]+)", (FOLDER / "README.md").read_text()
    )
    assert re.findall(r"epoch 15: loss ([\d.]+), test accuracy ([\d.]+)", shown) == [page]
