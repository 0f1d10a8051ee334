"""LARS and LAMB at a large batch reach the accuracy of the small one; plain SGD at that batch does not."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.scripts import EXAMPLES, run_script

FOLDER = EXAMPLES / "large_batch"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_batch_compare", FOLDER / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_batch_compare"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# data; the best rates of SGD with 32, LARS and LAMB with 512; and rates of SGD with 512, the best among them
BEST = [
    ("digits", 0.05, 3.0, 0.04, (0.3, 1.6)),
    pytest.param("clouds", 0.1, 4.0, 0.06, (0.5, 1.6), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("data", "small_rate", "lars_rate", "lamb_rate", "sgd_rates"), BEST)
def test_lars_keeps_the_accuracy_and_sgd_does_not(
    example: ModuleType,
    data: str,
    small_rate: float,
    lars_rate: float,
    lamb_rate: float,
    sgd_rates: tuple[float, ...],
) -> None:
    if data == "digits":
        pytest.importorskip("sklearn")
    problem = example.PROBLEMS[data]
    small = example.train(problem, "SGD", 32, small_rate)[-1]
    assert small > 0.96
    assert example.train(problem, "LARS", 512, lars_rate)[-1] > small - 0.02
    assert example.train(problem, "LAMB", 512, lamb_rate)[-1] > small - 0.02
    assert max(example.train(problem, "SGD", 512, lr)[-1] for lr in sgd_rates) < small - 0.05


def test_the_plot(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    example.plot({"a": [0.1, 0.5]}, "a title", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_what_is_missing_is_said(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for options, message in (
        (["--data", "digits"], "pip install scikit-learn, or take --data clouds"),
        (["--plot", "x.png"], "pip install matplotlib, or leave --plot out"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare.py", *options])
        errors: list[str] = []
        monkeypatch.setattr(
            "argparse.ArgumentParser.error", lambda _, text, errors=errors: errors.append(text)
        )
        example.parse_arguments()
        assert len(errors) == 1
        assert errors[0].endswith(message)


@pytest.mark.parametrize("optimizer", ["lars", "lamb"])
def test_an_engine_trains_with(optimizer: str, cifar: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    full = (FOLDER / "config.py").read_text()
    config.write_text(full.replace("BATCH_SIZE = 512", "BATCH_SIZE = 16") + "fp16['enabled'] = False\n")
    text = run_script("large_batch/train.py", "--config", config, "--optimizer", optimizer, data=cifar)
    assert text.index("initialized distributed environment") < text.index("Engine is built")
    assert "Epoch 0 / 2: 100%" in text
    losses = [float(loss) for loss in re.findall(r" 10/10 .*?loss=([\d.]+)", text)]
    first = float(re.findall(r"loss=([\d.]+)", text)[0])
    assert losses[-1] < first / 1.5


def test_noise_with_the_flag_of_the_page(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "BATCH_SIZE, NUM_EPOCHS, WARMUP_STEPS, WEIGHT_DECAY = 2, 1, 5, 1e-4\n"
        "LEARNING_RATE = dict(lars=0.1, lamb=1e-3)\nclip_grad_norm = 1.0\n"
    )
    text = run_script("large_batch/train.py", "--config", config, "-s")
    assert "build_cifar" not in text
    assert re.search(r"Epoch 0 / 1: 100%.* 10/10 ", text)
    assert "nan" not in text
