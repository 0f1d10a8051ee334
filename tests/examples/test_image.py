"""The image examples, small: engine, trainer and booster learn, and a checkpoint goes on under another
plan.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from colossalai.builder import build_from_registry
from colossalai.context import Config
from colossalai.registry import MODELS, OPTIMIZERS
from colossalai.testing import RankError
from tests.cli.tools import free_port, run
from tests.examples.scripts import EXAMPLES, TINY_VIT, run_script

CONFIGS = sorted((EXAMPLES / "image").glob("**/config*.py"))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.py"
    path.write_text(TINY_VIT)
    return path


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_the_engine_learns(config: Path, cifar: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "image" / "train_with_engine.py"
    options = ["--config", config, "--data", cifar]
    done = run("run", "--nproc_per_node", 2, "--master_port", free_port(), script, *options, cwd=tmp_path)
    assert done.code == 0, done
    text = done.out + done.err
    assert f"build_cifar uses CIFAR-10 in {cifar}: 160 images to train, 32 to test" in text
    losses, accuracies = numbers(r"train loss: ([\d.]+),", text), numbers(r"acc: ([\d.]+),", text)
    assert len(losses) == len(accuracies) == 3
    assert losses[-1] < losses[0] / 1.5
    assert accuracies[-1] > 0.5


def test_the_trainer_learns(config: Path, cifar: Path, tmp_path: Path) -> None:
    script = "image/train_with_trainer.py"
    text = run_script(script, "--config", config, "-c", tmp_path / "checkpoint", data=cifar, nprocs=2)
    losses = numbers(r"/ Train\]: Loss = ([\d.]+) ", text)
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 1.5
    assert numbers(r"Epoch 2 / Test\]: Loss = [\d.]+ \| Accuracy = ([\d.]+)", text)[0] > 0.5
    assert "[Epoch 2 / Train]: 100%" in text, "a progress bar"
    assert (tmp_path / "checkpoint" / "epoch_2.pt").is_file()


def test_a_booster_changes_its_plan_between_epochs(config: Path, cifar: Path, tmp_path: Path) -> None:
    common = ["--config", config, "-c", tmp_path / "checkpoint"]
    script = "image/train_with_booster.py"
    text = run_script(script, *common, "-p", "torch_fsdp", "-i", 1, data=cifar, nprocs=2)
    assert "initialize reads gradient_accumulation of the config; here -p torch_fsdp decides" in text
    losses, accuracies = numbers(r"train loss: ([\d.]+),", text), numbers(r"accuracy: ([\d.]+)%", text)
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 1.5
    assert accuracies[-1] > 50
    evaluated = run_script("image/eval.py", *common, "-e", 1, data=cifar)
    assert numbers(r"Epoch 1 - test loss: [\d.]+, test accuracy: ([\d.]+)%", evaluated) == accuracies[1:2]
    resumed = run_script(script, *common, "-r", 1, data=cifar)
    assert re.findall(r"Epoch (\d)", resumed) == ["2"]
    assert numbers(r"train loss: ([\d.]+),", resumed)[0] < losses[1]


def test_bad_options(config: Path, cifar: Path, tmp_path: Path) -> None:
    (tmp_path / "model_7").mkdir()
    with pytest.raises(RankError, match=r"nothing is left after epoch 7: NUM_EPOCHS = 3 in .*config.py"):
        run_script("image/train_with_booster.py", "--config", config, "-c", tmp_path, "-r", 7)
    for script, option in (("train_with_booster.py", "-r"), ("eval.py", "-e")):
        with pytest.raises(
            RankError, match=r"no checkpoint of epoch 3 in .*; there are those of epochs \[7\]"
        ):
            run_script(f"image/{script}", "--config", config, "-c", tmp_path, option, 3)
    with pytest.raises(
        RankError, match=r"there is no file nowhere.py; the folders of examples/ have configs"
    ):
        run_script("image/eval.py", "--config", "nowhere.py", "-e", 0)


def test_a_resnet_that_misses_its_target_is_an_error(cifar: Path, tmp_path: Path) -> None:
    small = tmp_path / "config.py"
    resnet = EXAMPLES / "image" / "resnet" / "config_cpu.py"
    small.write_text(resnet.read_text().replace("NUM_EPOCHS = 4", "NUM_EPOCHS = 1"))
    with pytest.raises(RankError, match=r"test accuracy .* is below the target of 200.00%"):
        run_script("image/train_with_booster.py", "--config", small, "-i", 0, "--target_acc", 2, data=cifar)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_config_fits_its_images(path: Path) -> None:
    config = Config.from_file(path)
    with torch.device("meta"):
        model = build_from_registry(config.model, MODELS)
        images = torch.empty(2, 3, config.IMG_SIZE, config.IMG_SIZE)
    assert model(images).shape == (2, 10)
    build_from_registry({**config.optimizer, "params": model.parameters()}, OPTIMIZERS)
    assert 0 <= config.WARMUP_EPOCHS < config.NUM_EPOCHS
