"""A vision transformer under data x pipeline x tensor parallelism; the config alone chooses the plan.

colossalai run --nproc_per_node 4 train.py --config config.py -s
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import colossalai
from colossalai.context import Config, ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.logging import get_dist_logger
from colossalai.nn import CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.utils import get_current_device, is_using_pp
from titans.dataloader.cifar10 import build_cifar
from titans.dataloader.noise import NoiseImages
from titans.model.pipeline_vit import build_pipeline_vit
from titans.utils.scripts import add_synthetic, image_parser


def parse_arguments() -> argparse.Namespace:
    config = Path(__file__).with_name("config.py")
    parser = image_parser(__doc__, config, "sizes, rates and the parallel plan")
    add_synthetic(parser)
    return parser.parse_args()


def build_model(config: Config) -> nn.Module:
    """This rank's part of the model: its stage of the pipeline, its piece of every weight."""
    return build_pipeline_vit(
        num_layers=config.DEPTH,
        img_size=config.IMG_SIZE,
        patch_size=config.PATCH_SIZE,
        hidden_size=config.HIDDEN_SIZE,
        num_heads=config.NUM_HEADS,
        mlp_ratio=config.MLP_RATIO,
        num_classes=config.NUM_CLASSES,
        init_method="jax",
        checkpoint=config.CHECKPOINT,
    )


def build_data(config: Config, args: argparse.Namespace) -> NoiseImages | DataLoader:
    size = config.IMG_SIZE
    if args.synthetic:
        return NoiseImages(config.BATCH_SIZE, size, config.NUM_CLASSES, gpc.get_local_rank(ParallelMode.DATA))
    # every batch must have the rows that micro-batches and tensor-parallel ranks share
    train, _ = build_cifar(config.BATCH_SIZE, args.data, crop=size, resize=size, drop_last=True)
    return train


def train_epoch(engine: Engine, data: NoiseImages | DataLoader, description: str) -> float:
    """The mean loss of one epoch, on every rank; ranks before the last stage see none while it runs."""
    engine.train()
    batches = iter(data)
    losses = torch.zeros(2, device=get_current_device())  # their sum and their number
    for _ in tqdm(range(len(data)), desc=description, disable=dist.get_rank() != 0):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(batches, return_output_label=False)
        engine.step()
        if loss is not None:
            losses += torch.stack([loss.float(), torch.ones_like(loss)])
    dist.all_reduce(losses)
    return (losses[0] / losses[1]).item()


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    logger, config = get_dist_logger(), gpc.config
    logger.info("initialized distributed environment", ranks=[0])

    model = build_model(config)
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if is_using_pp() else 0
    count = sum(p.numel() for p in model.parameters())
    logger.info(f"number of parameters: {count} on pipeline stage {stage}")

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.LEARNING_RATE, weight_decay=config.WEIGHT_DECAY
    )
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, config.NUM_EPOCHS, config.WARMUP_EPOCHS)
    engine, train_dataloader, _, lr_scheduler = colossalai.initialize(
        model,
        optimizer,
        CrossEntropyLoss(label_smoothing=0.1),
        build_data(config, args),
        lr_scheduler=lr_scheduler,
    )
    logger.info("Engine is built", ranks=[0])

    for epoch in range(config.NUM_EPOCHS):
        if not args.synthetic:
            train_dataloader.sampler.set_epoch(epoch)
        loss = train_epoch(engine, train_dataloader, f"Epoch {epoch} / {config.NUM_EPOCHS}")
        lr_scheduler.step()
        logger.info(f"Epoch {epoch} - train loss: {loss:.5}", ranks=[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
