"""The hybrid plans of the image examples: the full-size configs fit, and small ones learn with engine and
trainer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.builder import build_from_registry
from colossalai.context import Config, ParallelMode
from colossalai.context.fake_launch import fake_launch
from colossalai.core import global_context as gpc
from colossalai.registry import MODELS
from colossalai.testing import spawn
from tests.examples.scripts import EXAMPLES, run_script

FOLDER = "image/vision_transformer/hybrid_parallel"
CONFIGS = sorted(path for path in (EXAMPLES / FOLDER / "configs").glob("vit_*.py") if "cpu" not in path.stem)
# parameters of ViT-Base with 10 classes, by the formula in titans.model.vit
WHOLE = (3 * 16**2 + 1) * 768 + (196 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 769 * 10


def build_every_stage(rank: int, world_size: int, port: int, path: Path) -> tuple[Config, list[int], Any]:
    """The config; of one rank of each stage, its parameters; what the first stage makes of a micro-batch.

    On the meta device, in a world that does not exist.
    """
    config = Config.from_file(path)
    parallel = config.get("parallel", {})
    stages, size = parallel.get("pipeline", 1), parallel.get("tensor", {}).get("size", 1)
    counts, shape = [], None
    for stage in range(stages):
        with fake_launch({"parallel": parallel}, stage * size, stages * size):
            with torch.device("meta"):
                model = build_from_registry(config.model, MODELS)
            if stages > 1 and gpc.is_first_rank(ParallelMode.PIPELINE):
                rows = config.BATCH_SIZE // config.NUM_MICRO_BATCHES
                images = torch.empty(rows, 3, config.IMG_SIZE, config.IMG_SIZE, device="meta")
                shape = tuple(model.embed(images[: config.TENSOR_SHAPE[0]]).shape)
            counts.append(sum(p.numel() for p in model.parameters()))
    return config, counts, shape


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_full_size(path: Path) -> None:
    ((config, counts, shape),) = spawn(build_every_stage, 1, path=path)
    cut = config.get("parallel", {}).get("tensor", {})
    tensor = cut.get("size", 1)
    parts = tensor // cut.get("depth", 1)  # 2.5D cuts the activations further, not the weights
    assert WHOLE / parts <= sum(counts) < WHOLE / parts * 1.1  # what is not cut is small
    assert (len(counts), shape) == ((2, config.TENSOR_SHAPE) if "TENSOR_SHAPE" in config else (1, None))
    assert 0 <= config.WARMUP_EPOCHS < config.NUM_EPOCHS
    stages, mode = config.get("parallel", {}).get("pipeline", 1), config.get("TENSOR_PARALLEL_MODE", "")
    names = [f"{mode.replace('.', 'p')}_tp{tensor}"] * (tensor > 1) + [f"pp{stages}"] * (stages > 1)
    assert path.stem == {"": "vit_base", "pp2": "vit_pipeline"}.get("_".join(names), f"vit_{'_'.join(names)}")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    text = (EXAMPLES / FOLDER / "configs" / "vit_1d_tp2_pp2_cpu.py").read_text()
    for old, new in (
        ("NUM_EPOCHS = 12", "NUM_EPOCHS = 3"),
        ("BATCH_SIZE = 32", "BATCH_SIZE = 16"),
        ("hidden_size=128", "hidden_size=32"),
        ("lr=1e-3", "lr=1e-2"),
        ("WARMUP_EPOCHS = 1", "WARMUP_EPOCHS = 0"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "config.py").write_text(text)
    return tmp_path / "config.py"


PATTERNS = {
    "engine": (r"train loss: ([\d.]+),", r"acc: ([\d.]+),"),
    "trainer": (r"/ Train\]: Loss = ([\d.]+) ", r"/ Test\]: Loss = [\d.]+ \| Accuracy = ([\d.]+)"),
}


@pytest.mark.parametrize("door", PATTERNS)
def test_a_pipeline_of_tensor_parallel_stages_learns(door: str, small: Path, cifar: Path) -> None:
    # the engine's script logs on the first rank; the trainer's hooks log where the loss is, on the last stage
    name, rank = {"engine": ("train_hybrid", 0), "trainer": ("train_with_trainer", 2)}[door]
    text = run_script(f"{FOLDER}/{name}.py", "--config", small, data=cifar, nprocs=4, rank=rank)
    losses, accuracies = ([float(x) for x in re.findall(p, text)] for p in PATTERNS[door])
    assert len(losses) == len(accuracies) == 3
    assert losses[-1] < losses[0] / 1.5
    assert accuracies[-1] > 0.5


@pytest.mark.parametrize(
    ("documented", "ours"), [("pipeline_parallel", "vit_pipeline"), ("hybrid_parallel", "vit_1d_tp2_pp2")]
)
def test_the_configs_of_the_documents_commands(documented: str, ours: str) -> None:
    folder = EXAMPLES / FOLDER / "configs"
    config, same = (
        Config.from_file(folder / f"config_{documented}.py"),
        Config.from_file(folder / f"{ours}.py"),
    )
    assert config.items() <= same.items()
    assert {"parallel", "TENSOR_SHAPE", "NUM_MICRO_BATCHES", "fp16", "model", "optimizer"} <= config.keys()


def test_the_data_parallel_config_of_the_documents_command() -> None:
    config = Config.from_file(EXAMPLES / FOLDER / "configs" / "config_data_parallel.py")
    assert (config.BATCH_SIZE, config.gradient_accumulation, config.NUM_EPOCHS) == (256, 16, 300)
    assert "parallel" not in config
