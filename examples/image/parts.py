"""What the scripts of this folder share: their options, and the objects of a plain PyTorch training.

A config file chooses the model, the optimizer and their sizes (see ``resnet/config.py``); its other keys are
features of colossalai.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm

from colossalai.builder import build_from_registry
from colossalai.context import Config
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.registry import MODELS, OPTIMIZERS
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.utils.scripts import image_parser

HERE = Path(__file__).parent


class Parts(NamedTuple):
    """What a training needs, before any feature is put in."""

    model: nn.Module
    optimizer: Optimizer
    criterion: nn.Module
    train_dataloader: DataLoader
    test_dataloader: DataLoader
    lr_scheduler: LRScheduler


def build_parser(description: str | None) -> argparse.ArgumentParser:
    what = "model, optimizer, sizes and features; on a CPU, take a config_cpu.py"
    return image_parser(description, HERE / "resnet" / "config.py", what)


def checkpoint_of(parser: argparse.ArgumentParser, folder: Path, epoch: int) -> Path:
    """The model's part of a checkpoint; refused here, before the processes wait for each other."""
    path = folder / f"model_{epoch}"
    if not path.exists():
        names = [file.name.removeprefix("model_") for file in folder.glob("model_*")]
        there = sorted(int(name) for name in names if name.isdecimal())
        parser.error(
            f"there is no checkpoint of epoch {epoch} in {folder}; there are those of epochs"
            f" {there or 'none'}"
        )
    return path


def build_parts(config: Config, data: str) -> Parts:
    model = build_from_registry(config.model, MODELS)
    optimizer = build_from_registry({**config.optimizer, "params": model.parameters()}, OPTIMIZERS)
    size = config.IMG_SIZE
    # a pipeline cuts all batches into the same micro-batches
    even = "NUM_MICRO_BATCHES" in config
    train, test = build_cifar(
        config.BATCH_SIZE, data, padding=size // 8, crop=size, resize=size, drop_last=even
    )
    scheduler = CosineAnnealingWarmupLR(optimizer, config.NUM_EPOCHS, config.WARMUP_EPOCHS)
    return Parts(model, optimizer, CrossEntropyLoss(), train, test, scheduler)


def batches(loader: Iterable[Any], what: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches on this process's device, with a progress bar on the first one."""
    for images, labels in tqdm(loader, desc=what, leave=False, disable=dist.get_rank() != 0):
        yield images.to(get_current_device()), labels.to(get_current_device())


@torch.no_grad()
def evaluate(model: nn.Module, criterion: Any, loader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy over the test images of all processes."""
    model.eval()
    sums = torch.zeros(3, device=get_current_device())  # losses, right, all
    for images, labels in batches(loader, "test"):
        output = model(images)
        right = (output.argmax(dim=-1) == labels).sum()
        sums += torch.stack([criterion(output, labels) * len(labels), right, right.new_tensor(len(labels))])
    dist.all_reduce(sums)
    losses, right, count = sums.tolist()
    return losses / count, right / count


def mean(losses: list[Tensor]) -> float:
    """Of this epoch, over all processes that have losses: in a pipeline, those of the last stage."""
    total = torch.zeros(2, device=get_current_device())  # their sum and their number
    if losses:
        total += torch.stack([torch.stack(losses).sum(), total.new_tensor(len(losses))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
