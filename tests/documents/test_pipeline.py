"""Stages of a pipeline: of a sequential ViT (12) and of any model with ``PipelinableContext`` (41), up to
``initialize``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from tests.documents import timm_vit
from tests.documents.pages import code
from tests.documents.scripts import as_it_is, prepare, run, stand_in
from titans.model.resnet import resnet18

# the schedules are chosen by the config; the page imports them and uses neither
WITHOUT_SCHEDULES = (
    "from colossalai.engine.schedule import (InterleavedPipelineSchedule,\n"
    "                                        PipelineSchedule)\n",
    "",
)
SMALL_VIT = ("embed_dim=1024, depth=24, num_heads=16", "embed_dim=32, depth=6, num_heads=2, img_size=32")
ONLY_BUILD = (
    "    # build criterion\n",
    "    return model, build_cifar(BATCH_SIZE)\n\n    # build criterion\n",
)


def install() -> None:
    """What these pages import beside what ``prepare`` brings."""
    transforms = vars(sys.modules["torchvision.transforms"])
    transforms.update(AutoAugment=as_it_is, AutoAugmentPolicy=SimpleNamespace(CIFAR10="cifar10"))
    stand_in("timm.models.vision_transformer", **vars(timm_vit))
    sys.modules["torchvision.models"].resnet50 = resnet18  # type: ignore[attr-defined]
    names = dict.fromkeys(("BasicBlock", "Bottleneck", "conv1x1"))
    stand_in("torchvision.models.resnet", **names)


def through_both(stage: nn.Module, images: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What the second stage makes of what the first sends it."""
    if gpc.is_pipeline_first_stage():
        dist.send(stage(images).detach().contiguous(), 1)
        return None
    received = torch.empty(shape)
    dist.recv(received, 0)
    return stage(received)


def check_page_12(rank: int, world_size: int, port: int, folder: Path) -> list[str]:
    prepare(folder, arguments=["--backend", "gloo"])
    install()
    names = run(code("12.imports", WITHOUT_SCHEDULES), code("12.model", SMALL_VIT), code("12.cifar"))
    torch.manual_seed(3)
    whole = names["vit_large_patch16_224"]()
    built = code("12.train", ONLY_BUILD, ("logger = get_dist_logger()", "torch.manual_seed(3)"))
    exec(built, names)
    stage, (train_dataloader, _) = names["train"]()
    images, _ = next(iter(train_dataloader))
    assert images.shape == (16, 3, 32, 32)
    images = torch.ones(4, 3, 32, 32)
    out = through_both(stage, images, (4, 5, 32))
    if out is not None:
        torch.testing.assert_close(out, whole(images))
    return [name for name, _ in stage.named_children()]


def test_page_12_sequential_vit(tmp_path: Path) -> None:
    assert spawn(check_page_12, 2, folder=tmp_path) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


def check_page_41(rank: int, world_size: int, port: int, folder: Path) -> tuple[list[str], int]:
    prepare(folder, arguments=["--backend", "gloo"])
    install()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    whole = resnet18().eval()
    seeded = ("# build model\n", "# build model\ntorch.manual_seed(3)\n")
    # everything before ``colossalai.initialize``, which needs the schedules
    names: dict[str, Any] = run(
        code("41.build", seeded, ("BATCH_SIZE = 64", "BATCH_SIZE = 4")),
        code("41.exec_seq"),
        code("41.partition"),
        code("41.train").split("engine, train_dataloader")[0],
    )
    stage = names["model"].eval()
    assert len(names["optimizer"].param_groups[0]["params"]) == len(list(stage.parameters()))
    images, _ = next(iter(names["train_dataloader"]))
    assert images.shape == (4, 3, 32, 32)
    images = torch.ones(2, 3, 32, 32)
    out = through_both(stage, images, (2, 256, 2, 2))
    if out is not None:
        torch.testing.assert_close(out, whole(images))
    return [name for name, _ in stage.named_children()], sum(p.numel() for p in stage.parameters())


def test_page_41_resnet(tmp_path: Path) -> None:
    (first, small), (last, large) = spawn(check_page_41, 2, folder=tmp_path)
    assert first == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3"]
    assert last == ["layer4", "avgpool", "fc"]
    # balanced: layer4 alone has more than half of all parameters
    assert small < large
    assert small + large == sum(p.numel() for p in resnet18().parameters())
