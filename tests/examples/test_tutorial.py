"""The tutorial's commands, as its page has them; then only the config changes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from colossalai.context import Config
from colossalai.testing import RankError
from tests.cli.tools import Command, free_port
from tests.examples.scripts import EXAMPLES, changed_config, run_script

HYBRID = EXAMPLES / "tutorial" / "hybrid_parallel"

# what takes time: the pixels, and the second epoch
QUICK = (
    ("IMG_SIZE = 224", "IMG_SIZE = 32"),
    ("NUM_EPOCHS = 2", "NUM_EPOCHS = 1"),
    ("WARMUP_EPOCHS = 1", "WARMUP_EPOCHS = 0"),
)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"Epoch \d+ - train loss: (\S+)", text)]


def test_the_command_of_the_page(tmp_path: Path) -> None:
    """Two stages of two ranks each; the counts are those of the formula in titans.model.vit, cut in two."""
    config = changed_config(HYBRID, tmp_path / "config.py", QUICK[0])
    command = ["train.py", "--config", config, "-s"]
    run = Command("run", "--nproc_per_node", 4, "--master_port", free_port(), *command, cwd=HYBRID)
    done = run.finish(seconds=240)
    assert done.code == 0, done
    text = done.out + done.err
    assert text.count("initialized distributed environment") == 1
    assert text.count("Engine is built") == 1
    counts = re.findall(r"number of parameters: (\d+) on pipeline stage (\d)", text)
    assert sorted(counts, key=lambda found: found[1]) == [("232448", "0")] * 2 + [("134154", "1")] * 2
    for epoch in range(2):
        assert re.search(rf"Epoch {epoch} / 2: 100%.* 10/10 ", text)
    assert len(losses(text)) == 2
    # it starts at ln 10 with a classifier of zeros, and noise teaches nothing
    assert all(abs(loss - math.log(10)) < 0.5 for loss in losses(text))


def test_the_variables_of_the_config() -> None:
    config = dict(Config.from_file(HYBRID / "config.py"))
    mode = config.pop("fp16")["mode"]
    assert str(mode) == "AMP_TYPE.NAIVE"
    assert config == {
        "BATCH_SIZE": 4,
        "LEARNING_RATE": 3e-3,
        "WEIGHT_DECAY": 0.3,
        "NUM_EPOCHS": 2,
        "WARMUP_EPOCHS": 1,
        "IMG_SIZE": 224,
        "PATCH_SIZE": 16,
        "HIDDEN_SIZE": 128,
        "DEPTH": 4,
        "NUM_HEADS": 4,
        "MLP_RATIO": 2,
        "NUM_CLASSES": 10,
        "CHECKPOINT": False,
        "TENSOR_PARALLEL_SIZE": 2,
        "TENSOR_PARALLEL_MODE": "1d",
        "parallel": {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}},
        "clip_grad_norm": 1.0,
        "NUM_MICRO_BATCHES": 2,
    }


def tensor(mode: str, size: int) -> tuple[tuple[str, str], ...]:
    return (
        ("TENSOR_PARALLEL_SIZE = 2", f"TENSOR_PARALLEL_SIZE = {size}"),
        ('TENSOR_PARALLEL_MODE = "1d"', f'TENSOR_PARALLEL_MODE = "{mode}"'),
    )


PIPELINE_1 = ("pipeline=2", "pipeline=1")
DEPTH_2 = ("size=TENSOR_PARALLEL_SIZE", "size=TENSOR_PARALLEL_SIZE, depth=2")
PLANS = [
    pytest.param(8, tensor("2d", 4), id="2d x pipeline"),
    pytest.param(8, tensor("1d", 4), id="1d x pipeline", marks=pytest.mark.slow),
    pytest.param(8, (*tensor("2.5d", 8), PIPELINE_1, DEPTH_2), id="2.5d", marks=pytest.mark.slow),
    pytest.param(8, (*tensor("3d", 8), PIPELINE_1), id="3d", marks=pytest.mark.slow),
    pytest.param(8, tensor("1d", 2), id="data x pipeline x 1d", marks=pytest.mark.slow),
    pytest.param(
        16,
        (*tensor("3d", 8), ("BATCH_SIZE = 4", "BATCH_SIZE = 8")),
        id="3d x pipeline",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("nprocs", "changes"), PLANS)
def test_only_the_config_changes(nprocs: int, changes: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    config = changed_config(HYBRID, tmp_path / "config.py", *QUICK, *changes)
    text = run_script("tutorial/hybrid_parallel/train.py", "--config", config, "-s", nprocs=nprocs)
    assert re.search(r"Epoch 0 / 1: 100%.* 10/10 ", text)
    (loss,) = losses(text)
    assert abs(loss - math.log(10)) < 0.5


def test_it_learns_images_from_a_path(cifar: Path, tmp_path: Path) -> None:
    few = (
        ("NUM_EPOCHS = 1", "NUM_EPOCHS = 4"),
        ("BATCH_SIZE = 4", "BATCH_SIZE = 12"),
        ("fp16 = dict(", "fp16 = dict(enabled=False, "),  # slow on a CPU
    )
    config = changed_config(HYBRID, tmp_path / "config.py", *QUICK, *few, PIPELINE_1)
    text = run_script("tutorial/hybrid_parallel/train.py", "--config", config, "--data", cifar, nprocs=2)
    assert f"build_cifar uses CIFAR-10 in {cifar}: 160 images to train" in text
    assert " 13/13 " in text  # 160 = 13 x 12 + 4, which are left out
    first, *_, last = losses(text)
    assert last < first / 1.2


def test_a_wrong_number_of_processes_is_refused_once(tmp_path: Path) -> None:
    message = (
        r"the world size 3 is not a multiple of pipeline 2 x tensor 2 = 4; start a multiple of 4 processes"
    )
    with pytest.raises(RankError, match=message):
        run_script("tutorial/hybrid_parallel/train.py", "-s", nprocs=3)


def test_a_micro_batch_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    config = changed_config(
        HYBRID, tmp_path / "config.py", *QUICK, *tensor("2d", 4), ("BATCH_SIZE = 4", "BATCH_SIZE = 2")
    )
    with pytest.raises(RankError, match=r"a batch of 1 rows is shared by .* = 2 ranks; the nearest valid"):
        run_script("tutorial/hybrid_parallel/train.py", "--config", config, "-s", nprocs=8)
