"""ResNet-18 with LARS or LAMB and an engine.

colossalai run --nproc_per_node 4 examples/large_batch/train.py --config examples/large_batch/config.py --optimizer lamb
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import Lamb, Lars
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet18

OPTIMIZERS = {"lars": lambda p, **options: Lars(p, momentum=0.9, **options), "lamb": Lamb}
SYNTHETIC_STEPS = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).with_name("config.py"),
        help="sizes, rates and features; on a CPU take config_cpu.py (%(default)s)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lars", help="(%(default)s)")
    parser.add_argument(
        "-s",
        "--synthetic",
        action="store_true",
        help=f"{SYNTHETIC_STEPS} batches of noise per epoch, instead of CIFAR-10 or its stand-in",
    )
    parser.add_argument(
        "--data", default=os.environ.get("DATA", "data"), help="folder of CIFAR-10 (default: $DATA, or data)"
    )
    return parser.parse_args()


def noise(batch_size: int) -> Sequence[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))) for _ in range(SYNTHETIC_STEPS)
    ]


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    logger, config = get_dist_logger(), gpc.config
    logger.info("initialized distributed environment", ranks=[0])
    if args.synthetic:
        train_dataloader = noise(config.BATCH_SIZE)
    else:
        train_dataloader, _ = build_cifar(config.BATCH_SIZE, args.data, padding=4, crop=32, resize=32)
    model = resnet18(num_classes=10)
    optimizer = OPTIMIZERS[args.optimizer](
        model.parameters(), lr=config.LEARNING_RATE[args.optimizer], weight_decay=config.WEIGHT_DECAY
    )
    steps = config.NUM_EPOCHS * len(train_dataloader)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, steps, min(config.WARMUP_STEPS, steps // 2))
    engine, train_dataloader, _, lr_scheduler = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, lr_scheduler=lr_scheduler
    )
    logger.info("Engine is built", ranks=[0])

    engine.train()
    for epoch in range(config.NUM_EPOCHS):
        if not args.synthetic:
            train_dataloader.sampler.set_epoch(epoch)
        bar = tqdm(
            train_dataloader, desc=f"Epoch {epoch} / {config.NUM_EPOCHS}", disable=dist.get_rank() != 0
        )
        for images, labels in bar:
            engine.zero_grad()
            output = engine(images.to(get_current_device()))
            loss = engine.criterion(output, labels.to(get_current_device()))
            engine.backward(loss)
            engine.step()
            lr_scheduler.step()
            bar.set_postfix(loss=f"{loss.item():.4f}", lr=f"{lr_scheduler.get_last_lr()[0]:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
