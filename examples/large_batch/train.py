"""ResNet-18 with LARS or LAMB and an engine.

colossalai run --nproc_per_node 4 examples/large_batch/train.py --config examples/large_batch/config.py
--optimizer lamb
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import colossalai
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import Lamb, Lars
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.dataloader.noise import NoiseImages
from titans.model.resnet import resnet18
from titans.utils.scripts import add_synthetic, image_parser

OPTIMIZERS = {"lars": lambda p, **options: Lars(p, momentum=0.9, **options), "lamb": Lamb}


def parse_arguments() -> argparse.Namespace:
    config = Path(__file__).with_name("config.py")
    parser = image_parser(__doc__, config, "sizes, rates and features; on a CPU take config_cpu.py")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="lars", help="(%(default)s)")
    add_synthetic(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    logger, config = get_dist_logger(), gpc.config
    logger.info("initialized distributed environment", ranks=[0])
    if args.synthetic:
        train_dataloader = NoiseImages(config.BATCH_SIZE, 32, 10, seed=dist.get_rank())
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
