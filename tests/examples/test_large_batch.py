"""LARS at a large batch reaches the accuracy of the small one; plain SGD at that batch does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "large_batch" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_batch_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_batch_train"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_lars_keeps_the_accuracy_and_sgd_does_not(example: ModuleType) -> None:
    small = example.train("SGD", 32, 0.1)[-1]
    assert small > 0.97
    assert example.train("LARS", 512, 4.0)[-1] > small - 0.01
    assert example.train("LAMB", 512, 0.06)[-1] > small - 0.015
    # the best rate found and the one of the linear scaling rule
    assert max(example.train("SGD", 512, lr)[-1] for lr in (0.5, 1.6)) < small - 0.03


def test_the_plot(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.plot({"a": [0.1, 0.5]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
