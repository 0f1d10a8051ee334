"""WideNet on digits: one curve for every number of processes, and for every way to share the experts out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, changed_config, run_script

pytest.importorskip("sklearn")

FOLDER = EXAMPLES / "image" / "widenet"
SHARED = "parallel = dict(moe=dict(size=MOE_MODEL_PARALLEL_SIZE))"


def curve(tmp_path: Path, ranks: int, epochs: int, *changes: tuple[str, str]) -> list[tuple[float, float]]:
    """The losses and accuracies of the epochs."""
    short = (("NUM_EPOCHS = 15", f"NUM_EPOCHS = {epochs}"), ("WARMUP_EPOCHS = 2", "WARMUP_EPOCHS = 0"))
    config = changed_config(FOLDER, tmp_path / "config.py", *short, *changes)
    shown = run_script("image/widenet/train.py", "--config", config, data=tmp_path, nprocs=ranks)
    found = re.findall(r"epoch \d+: loss ([\d.]+), test accuracy ([\d.]+)", shown)
    assert len(found) == epochs, shown
    return [(float(loss), float(right)) for loss, right in found]


def test_one_curve_on_one_two_and_four_processes(tmp_path: Path) -> None:
    alone = curve(tmp_path, 1, 3)
    assert alone[-1][0] < alone[0][0] - 0.5
    assert alone[-1][1] > 0.7
    for ranks in (2, 4):
        assert curve(tmp_path, ranks, 1) == pytest.approx(alone[:1], abs=2e-6)


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
    alone = curve(tmp_path, 1, 1)
    assert curve(tmp_path, ranks, 1, (SHARED, parallel)) == pytest.approx(alone, abs=2e-6)


@pytest.mark.slow
def test_the_accuracy_of_the_page(tmp_path: Path) -> None:
    shown = run_script("image/widenet/train.py", data=tmp_path)
    (page,) = re.findall(
        r"epoch 15: loss ([\d.]+), test accuracy ([\d.]+)", (FOLDER / "README.md").read_text()
    )
    assert re.findall(r"epoch 15: loss ([\d.]+), test accuracy ([\d.]+)", shown) == [page]
