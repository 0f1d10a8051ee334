"""The feature examples: each shows its feature, and is asked here whether what it shows is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from colossalai.testing import spawn
from tests.examples.scripts import EXAMPLES, help_of_all, run_script

SCRIPTS = sorted(
    path
    for path in EXAMPLES.glob("**/*.py")
    if "__main__" in path.read_text()  # the others are their modules and configs
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Where ``smaller`` writes."""
    return tmp_path / "config.py"


def smaller(config: str, path: Path) -> Path:
    """A config of ``examples/features`` with a batch of 4."""
    text = (EXAMPLES / "features" / config).read_text()
    assert "BATCH_SIZE = 128" in text
    path.write_text(text.replace("BATCH_SIZE = 128", "BATCH_SIZE = 4"))
    return path


def test_accumulation_moves_the_weights_at_the_fourth_iteration_only(small: Path, cifar: Path) -> None:
    folder = "features/gradient_accumulation"
    config = smaller("gradient_accumulation/config.py", small)
    engine = run_script(f"{folder}/run_resnet_cifar10_with_engine.py", "--config", config, data=cifar)
    booster = run_script(f"{folder}/train.py", "--batch_size", 4, data=cifar)
    pattern = r"iteration (\d), first 10 elements of param: tensor\((\[.*\])\)"
    values = [(int(i), ast.literal_eval(x)) for i, x in re.findall(pattern, engine)]
    assert [i for i, _ in values] == [0, 1, 2, 3]
    (_, first), (_, second), (_, third), (_, fourth) = values
    assert first == second == third != fourth
    assert len(first) == 10
    assert re.findall(pattern, booster) == re.findall(pattern, engine), "one implementation, two doors"
    assert "The parameter is only updated in the last iteration" in booster


def test_clipping(small: Path, cifar: Path) -> None:
    folder = "features/gradient_clipping"
    config = smaller("gradient_clipping/config.py", small)
    engine = run_script(f"{folder}/train_with_engine.py", "--config", config, data=cifar)
    booster = run_script(f"{folder}/train.py", "--batch_size", 4, data=cifar)
    for text, limit in ((engine, 1.0), (booster, 0.1)):
        norms = re.findall(r"gradient norm: ([\d.]+), after clipping: ([\d.]+)", text)
        assert len(norms) == 4
        assert all(float(before) > 1 and float(after) == limit for before, after in norms)


def test_the_handler_averages_over_the_ranks(small: Path, cifar: Path) -> None:
    config = smaller("gradient_handler/config.py", small)
    text = run_script(
        "features/gradient_handler/train_with_engine.py", "--config", config, data=cifar, nprocs=2
    )
    lines = re.findall(
        r"by rank: (\[.*?\]), after the handler: (\[.*?\]), norm of the weights: (\[.*?\])", text
    )
    assert len(lines) == 4
    for line in lines:
        before, after, weights = map(ast.literal_eval, line)
        assert before[0] != before[1]
        assert after[0] == after[1] < max(before)
        assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("mode", "weights"), [("torch", "float32"), ("naive", "float16"), ("apex", "float32")]
)
def test_amp_with_an_engine(mode: str, weights: str, cifar: Path) -> None:
    config = EXAMPLES / "features" / "amp" / "config" / f"config_AMP_{mode}.py"
    text = run_script("features/amp/train_with_engine.py", "--tiny", "--config", config, data=cifar)
    _check_amp(text, weights, first_scale=2**16)


@pytest.mark.parametrize(("precision", "scale"), [("fp32", 1), ("bf16", 1), ("fp16", 2**16)])
def test_amp_with_a_booster(precision: str, scale: float, cifar: Path) -> None:
    text = run_script("features/amp/train.py", "--tiny", "--precision", precision, data=cifar)
    _check_amp(text, "float32", scale)


def _check_amp(text: str, weights: str, first_scale: float) -> None:
    pattern = r"iteration \d, loss: ([\d.]+), weights: (\w+), next loss scale: ([\d.]+), step: (\w+)"
    lines = re.findall(pattern, text)
    assert len(lines) == 8
    assert all(1 < float(loss) < 4 for loss, *_ in lines), "near ln 10, and no nan"
    assert {dtype for _, dtype, _, _ in lines} == {weights}
    assert float(lines[0][2]) == first_scale
    assert [step for *_, step in lines].count("made") >= 5


def test_every_script_has_help() -> None:
    assert len(SCRIPTS) >= 14
    (texts,) = spawn(help_of_all, 1, scripts=SCRIPTS)
    for script, text in texts.items():
        assert "usage: " in text, script
        assert len(text.splitlines()) > 8, f"{script} says too little"
        assert "show this help message and exit" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_script_is_in_a_readme(script: Path) -> None:
    readmes = [
        f / "README.md" for f in script.parents if (f / "README.md").is_file() and EXAMPLES in (f, *f.parents)
    ]
    assert any(script.name in readme.read_text() for readme in readmes)
