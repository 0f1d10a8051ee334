"""ResNet-50 on CIFAR-10, made parallel by one call: every operation gets the cut that makes a step shortest.

colossalai run --nproc_per_node 4 auto_parallel_with_resnet.py -s
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
from parts import count
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import colossalai
from colossalai.auto_parallel.tensor_shard.initialize import initialize_device_mesh, initialize_model
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import MEAN, STD, load_cifar
from titans.dataloader.images import ImageDataset, ImageTransform
from titans.dataloader.noise import NoiseImages
from titans.model import resnet
from titans.utils.scripts import add_synthetic, image_parser

CLASSES, PIXELS = 10, 32
Batches = Iterable[tuple[Tensor, Tensor]]


def parse_arguments() -> argparse.Namespace:
    parser = image_parser(__doc__)
    add_synthetic(parser)
    parser.add_argument("--model", default="resnet50", help="a model of titans.model.resnet (%(default)s)")
    parser.add_argument("--batch_size", type=count, default=32, help="of all devices together (%(default)s)")
    parser.add_argument("--epochs", type=count, default=2)
    parser.add_argument("--steps", type=count, default=10, help="in an epoch of noise, with -s (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--memory_budget", type=float, default=-1.0, help="bytes that a device may use; -1 for any"
    )
    return parser.parse_args()


def build_data(args: argparse.Namespace) -> tuple[Batches, Batches]:
    """Whole batches, the same on every device: the plan cuts them."""
    if args.synthetic:
        size = args.batch_size, PIXELS, CLASSES
        return NoiseImages(*size, steps=args.steps), NoiseImages(*size, seed=1, steps=2)
    source = load_cifar(args.data)
    augment = ImageTransform(PIXELS, PIXELS, MEAN, STD, 4, train=True)
    plain = ImageTransform(PIXELS, PIXELS, MEAN, STD)
    order = torch.Generator().manual_seed(0)
    options = {"batch_size": args.batch_size, "drop_last": True}  # a plan is for one size
    train = DataLoader(ImageDataset(*source.train, augment), shuffle=True, generator=order, **options)
    return train, DataLoader(ImageDataset(*source.test, plain), **options)


def build_model(args: argparse.Namespace) -> nn.Module:
    """The parallel model; prints a line for each operation."""
    torch.manual_seed(0)
    model = getattr(resnet, args.model)(num_classes=CLASSES, small_images=True).to(get_current_device())
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if ranks > 1 and ranks % 2 == 0 else (1, ranks)
    device_mesh = initialize_device_mesh(logical_mesh_shape=shape)
    meta_args = {"images": torch.rand(args.batch_size, 3, PIXELS, PIXELS, device="meta")}
    model, solution = initialize_model(
        model, meta_args, device_mesh, memory_budget=args.memory_budget, return_solution=True
    )
    if dist.get_rank() == 0:
        for line in solution:
            print(line, flush=True)
    return model


def train_epoch(model: nn.Module, batches: Batches, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    device, losses = get_current_device(), []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    model.eval()
    device, losses, hits, count = get_current_device(), [], 0, 0
    for images, labels in batches:
        scores, labels = model(images.to(device)), labels.to(device)
        losses.append(nn.functional.cross_entropy(scores, labels))
        hits += int((scores.argmax(-1) == labels).sum())
        count += len(labels)
    return float(torch.stack(losses).mean()), hits / count


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch({}, verbose=False)
    train, test = build_data(args)
    model = build_model(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        (lr,) = schedule.get_last_lr()
        train_loss = train_epoch(model, train, optimizer)
        test_loss, accuracy = evaluate(model, test)
        schedule.step()
        if dist.get_rank() == 0:
            print(
                f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5},"
                f" acc: {accuracy:.5}, lr: {lr:.5g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
