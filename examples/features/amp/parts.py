"""What both scripts train: a vision transformer on CIFAR-10's images, with ``--tiny`` one for a CPU."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from titans.dataloader.cifar10 import build_cifar
from titans.model.vit import VisionTransformer, vit_base_patch16_224
from titans.utils.scripts import image_parser

TINY_BATCH = 16


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = image_parser(description)
    parser.add_argument("--iterations", type=int, default=8, help="how many to run (%(default)s)")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=f"32x32 images, 2 layers, batches of {TINY_BATCH}: for a CPU. Otherwise ViT-Base at 224x224",
    )
    return parser


def build(args: argparse.Namespace, batch_size: int) -> tuple[nn.Module, DataLoader]:
    if args.tiny:
        size, batch_size = 32, TINY_BATCH
        model: nn.Module = VisionTransformer(size, 8, 3, 10, depth=2, num_heads=4, hidden_size=64)
    else:
        size, model = 224, vit_base_patch16_224(num_classes=10)
    loader, _ = build_cifar(batch_size, args.data, crop=size, resize=size)
    return model, loader


def describe(idx: int, loss: float, model: nn.Module, optimizer: Any) -> str:
    """bf16 and fp32 have no loss scale, and never skip a step."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    scale = getattr(optimizer, "loss_scale", 1.0)
    step = "skipped" if getattr(optimizer, "step_was_skipped", False) else "made"
    return f"iteration {idx}, loss: {loss:.4f}, weights: {dtype}, next loss scale: {scale:g}, step: {step}"
