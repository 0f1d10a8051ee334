"""ViT from data parallelism to hybrid parallelism (page 13): its scripts run, and its stages equal the serial
model.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import NonPipelineSchedule, PipelineSchedule
from colossalai.nn import CrossEntropyLoss
from colossalai.testing import RankError, parametrize_sample, spawn
from colossalai.testing.parity import Problem, check_plan
from tests.documents.hand_split import HandSplitRun
from tests.documents.pages import code
from tests.documents.scripts import prepare, run, stand_in
from tests.documents.test_pipeline import install as install_images
from titans.model.vit import VisionTransformer

ON_CPU = ("torch.device('cuda')", "torch.device('cpu')")


def small_vit(drop_rate: float, num_classes: int) -> torch.nn.Module:
    return VisionTransformer(
        32, 16, num_classes=num_classes, depth=1, num_heads=2, hidden_size=16, dropout=drop_rate
    )


def install(folder: Path, config: str) -> None:
    """The place of the page's scripts; the stand-in's images have 32 x 32 pixels."""
    prepare(folder, config, arguments=["--config", "config.py"])
    install_images()
    torch.set_num_threads(1)
    sys.modules["timm.models"].vit_base_patch16_224 = small_vit  # type: ignore[attr-defined]
    stand_in("torch.utils.tensorboard", SummaryWriter=MagicMock())


# ---- data parallelism ----


def check_data_parallel(rank: int, world_size: int, port: int, folder: Path) -> tuple[str, list[float]]:
    short = (
        ("BATCH_SIZE = 256", "BATCH_SIZE = 8"),
        ("NUM_EPOCHS = 300", "NUM_EPOCHS = 2"),
        ("gradient_accumulation = 16", "gradient_accumulation = 2"),
    )
    # the page's model reads NUM_CLASSES, which the page's config leaves out
    install(folder, code("13.data_parallel", *short) + "NUM_CLASSES = 10\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = run(code("13.imports"), code("13.other_imports"), code("13.launch"), code("13.access"))
    from colossalai.utils import get_dataloader  # the page forgets to

    # the page names a metric that it does not have; the one it imports is meant
    names.update(get_dataloader=get_dataloader, MixupAccuracy=names["Accuracy"])
    for block in (
        code("13.build_model"),
        code("13.cifar"),
        # 50 of 300 epochs
        code("13.optimizer", ("warmup_steps=50", "warmup_steps=1")),
        code("13.initialize"),
        code("13.trainer"),
        code("13.fit", ("display_progress=True", "display_progress=False")),
    ):
        exec(compile(block, "documentation", "exec"), names)
    writer = sys.modules["torch.utils.tensorboard"].SummaryWriter  # type: ignore[attr-defined]
    assert writer.called == writer.return_value.add_scalar.called == (rank == 0)
    metrics = names["trainer"].states["metrics"]
    return printed.getvalue(), [float(m.get_accumulated_value()) for m in metrics["train"].values()]


def test_page_13_data_parallel(tmp_path: Path) -> None:
    (printed, metrics), _ = spawn(check_data_parallel, 2, folder=tmp_path)
    assert printed.splitlines()[-1] == "8"
    assert all(math.isfinite(value) for value in metrics)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["epoch_0.pt", "epoch_1.pt"]


# ---- pipeline and hybrid parallelism ----

SMALL = (
    ("BATCH_SIZE = 256", "BATCH_SIZE = 8"),
    ("NUM_EPOCHS = 300", "NUM_EPOCHS = 1"),
    ("WARMUP_EPOCHS = 32", "WARMUP_EPOCHS = 0"),
    ("IMG_SIZE = 224", "IMG_SIZE = 32"),
    ("HIDDEN_SIZE = 768", "HIDDEN_SIZE = 16"),
    ("DEPTH = 12", "DEPTH = 4"),
    ("NUM_HEADS = 12", "NUM_HEADS = 4"),
)
WITH_BATCH_SIZE = ("build_cifar()", "build_cifar(gpc.config.BATCH_SIZE)")  # it takes one


def check_hybrid(rank: int, world_size: int, port: int, folder: Path, config: str) -> tuple[str, type, int]:
    """The page's second script from its first line to its last."""
    install(folder, config)
    stand_in("model.vit", **run(code("13.stages", ON_CPU)))
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(err):
        names = run(
            code("13.hybrid_imports"),
            code("13.hybrid_launch"),
            code("13.hybrid_model"),
            code("13.hybrid_components", WITH_BATCH_SIZE),
            code("13.hybrid_initialize"),
            "before = [p.detach().clone() for p in model.parameters()]",
            code("13.hybrid_train"),
        )
    moved = sum(
        not torch.equal(p, q) for p, q in zip(names["model"].parameters(), names["before"], strict=True)
    )
    assert all(p.isfinite().all() for p in names["model"].parameters())
    return err.getvalue(), type(names["engine"].schedule), moved


CONFIGS = {
    "pipeline": (code("13.pipeline_other", *SMALL) + code("13.pipeline"), 2, PipelineSchedule),
    "hybrid": (code("13.hybrid_other", *SMALL) + code("13.hybrid"), 4, PipelineSchedule),
    "tensor": (
        code("13.hybrid_other", *SMALL) + code("13.hybrid", ("pipeline=2", "pipeline=1")),
        2,
        NonPipelineSchedule,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_page_13_hybrid(name: str, tmp_path: Path) -> None:
    config, nprocs, schedule = CONFIGS[name]
    ranks = spawn(check_hybrid, nprocs, folder=tmp_path, config=config + "LOG_PATH = 'logs'\n")
    assert all(kind is schedule and moved for _, kind, moved in ranks)
    assert re.search("Epoch 0 / 1: 100%.* 10/10 ", ranks[0][0])  # 80 images in batches of 8
    assert list((tmp_path / "logs").iterdir())
    built = re.findall(r"build layer (\d-\d), 2/4 layers", "".join(err for err, *_ in ranks))
    assert sorted(built) == (
        [] if schedule is NonPipelineSchedule else ["0-2"] * (nprocs // 2) + ["2-4"] * (nprocs // 2)
    )


def test_page_13_second_pass_over_the_data_needs_an_iterator(tmp_path: Path) -> None:
    """The page takes one iterator for all epochs."""
    config = CONFIGS["tensor"][0].replace("NUM_EPOCHS = 1", "NUM_EPOCHS = 2")
    with pytest.raises(
        RankError, match=r"execute_schedule has no batch left: .* take iter\(dataloader\) anew"
    ):
        spawn(check_hybrid, 2, folder=tmp_path, config=config)


# ---- the page's stages equal the serial model ----

DEPTH = 4
SIZES: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "depth": DEPTH,
    "num_heads": 4,
    "dim": 16,
    "num_classes": 10,
    "dropout": 0.0,
    "checkpoint": True,
}


def serial_name(name: str, start: int) -> str:
    """The page numbers the layers of each stage from 0; the embedding is layer 0 of the model."""
    layers, number, rest = name.split(".", 2)
    return f"{layers}.{int(number) + start + (start > 0)}.{rest}"


def check_parity(rank: int, world_size: int, port: int, plan: dict[str, Any], chunks: int) -> None:
    torch.set_num_threads(1)
    names = run(code("13.stages", ON_CPU))
    torch.manual_seed(0)
    whole = names["PipelineVisionTransformer"](**SIZES)  # before the launch: on one device
    rows = 8 * world_size // (plan["pipeline"] * plan.get("tensor", {"size": 1})["size"])
    batches = [(torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))) for _ in range(3)]
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    problem = Problem(
        build=lambda: copy.deepcopy(whole), batches=batches, loss=lambda m, b: loss(m(b[0]), b[1])
    )
    config: dict[str, Any] = {"parallel": plan, "NUM_MICRO_BATCHES": 2}
    if chunks > 1:
        config["model"] = {"num_chunks": chunks}
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)
    stages = names["build_pipeline_vit"](num_layers=DEPTH, num_chunks=chunks, **SIZES)
    assert gpc.is_initialized(ParallelMode.PIPELINE) or plan["pipeline"] == 1
    criterion = CrossEntropyLoss(label_smoothing=0.1)
    check_plan(problem, lambda p: HandSplitRun(p, stages, serial_name, DEPTH, criterion))


TENSOR: list[dict[str, Any]] = [
    {"size": 2, "mode": "1d"},
    {"size": 4, "mode": "2d"},
    {"size": 4, "mode": "2.5d", "depth": 1},
]
PLANS: list[tuple[int, dict[str, Any], int]] = [
    (8, {"pipeline": 2, "tensor": TENSOR[0]}, 1),  # and 2 data-parallel ranks
    (4, {"pipeline": 2}, 1),
    (2, {"pipeline": 2}, 2),
    (4, {"pipeline": 4}, 1),
    (8, {"pipeline": 2, "tensor": TENSOR[1]}, 1),
    (4, {"pipeline": 2, "tensor": TENSOR[0]}, 2),
    (8, {"pipeline": 2, "tensor": TENSOR[2]}, 1),
    (8, {"pipeline": 2, "tensor": {"size": 4, "mode": "1d"}}, 1),
]


@parametrize_sample("nprocs, plan, chunks", PLANS, n=2)
def test_page_13_stages_equal_the_serial_model(nprocs: int, plan: dict[str, Any], chunks: int) -> None:
    spawn(check_parity, nprocs, plan=plan, chunks=chunks, timeout=120)
