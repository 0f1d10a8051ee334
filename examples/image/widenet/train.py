"""WideNet, a vision transformer whose blocks share one attention and one set of experts, on digits.

    colossalai run --nproc_per_node 2 examples/image/widenet/train.py

The experts lie on different processes, and the losses are those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import colossalai
from colossalai.builder import build_from_registry
from colossalai.context import Config
from colossalai.context.random import moe_set_seed
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.nn import MoeLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.registry import MODELS, OPTIMIZERS
from colossalai.utils import get_current_device
from colossalai.utils.dataloader import data_parallel_place
from titans.dataloader.cifar10 import MEAN, STD, Images, load_cifar
from titans.dataloader.images import ImageDataset, ImageTransform
from titans.utils.scripts import image_parser


class SharedBatches(Sampler[list[int]]):
    """Batches of ``size`` samples, of which each process takes its part, one process after the other.

    Tokens find places with the experts in the order of the batch.  With the order that one process has, many
    train as one does.
    """

    def __init__(self, samples: int, size: int, shuffle: bool) -> None:
        self.samples, self.size, self.shuffle, self.epoch = samples, size, shuffle, 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.samples)
        if self.shuffle:
            order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch))
            order = order[: len(self) * self.size]
            self.epoch += 1
        rank, ranks = data_parallel_place()
        for batch in order.split(self.size):
            yield batch.tensor_split(ranks)[rank].tolist()

    def __len__(self) -> int:
        return self.samples // self.size if self.shuffle else -(-self.samples // self.size)


def parse_arguments() -> argparse.Namespace:
    return image_parser(__doc__, Path(__file__).with_name("config.py")).parse_args()


def build_loader(images: Images, config: Config, shuffle: bool = False) -> DataLoader:
    plain = ImageTransform(config.IMG_SIZE, config.IMG_SIZE, MEAN, STD)
    batches = SharedBatches(len(images.labels), config.BATCH_SIZE, shuffle)
    return DataLoader(ImageDataset(*images, plain), batch_sampler=batches)


def batches(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    device = get_current_device()
    for images, labels in loader:
        yield images.to(device, gpc.config.DTYPE), labels.to(device)


def train_epoch(engine: Engine, loader: DataLoader, schedule: CosineAnnealingWarmupLR) -> float:
    """The mean loss of the steps, over all processes."""
    engine.train()
    losses = []
    for images, labels in batches(loader):
        engine.zero_grad()
        loss = engine.criterion(engine(images), labels)
        engine.backward(loss)
        engine.step()
        schedule.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def accuracy(engine: Engine, loader: DataLoader) -> float:
    """The share of the test images that are recognized, over all processes."""
    engine.eval()
    counts = torch.zeros(2, device=get_current_device())  # right, and all
    for images, labels in batches(loader):
        right = engine(images).argmax(-1) == labels
        counts += torch.stack([right.sum(), (labels >= 0).sum()])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    args = parse_arguments()
    settings = Config.from_file(args.config)
    colossalai.launch_from_torch(config=settings, seed=settings.SEED, verbose=False)
    logger, config = get_dist_logger(), gpc.config
    source = load_cifar(args.data)
    logger.info(f"data: {source.name}", ranks=[0])
    train_loader, test_loader = build_loader(source.train, config, True), build_loader(source.test, config)

    moe_set_seed(config.SEED)
    model = build_from_registry(config.model, MODELS).to(config.DTYPE)
    optimizer = build_from_registry({**config.optimizer, "params": model.parameters()}, OPTIMIZERS)
    criterion = MoeLoss(aux_weight=config.AUX_WEIGHT, loss_fn=nn.CrossEntropyLoss, label_smoothing=0.1)
    steps = len(train_loader)
    schedule = CosineAnnealingWarmupLR(optimizer, config.NUM_EPOCHS * steps, config.WARMUP_EPOCHS * steps)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    for epoch in range(1, config.NUM_EPOCHS + 1):
        loss = train_epoch(engine, train_loader, schedule)
        right = accuracy(engine, test_loader)
        logger.info(f"epoch {epoch}: loss {loss:.6f}, test accuracy {right:.4f}", ranks=[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
