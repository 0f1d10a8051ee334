"""Train a ResNet or a vision transformer on CIFAR-10, or on its stand-in, under a plan of your choice.

    colossalai run --nproc_per_node 2 examples/image/train.py --model vit -p torch_fsdp

Every ``--interval`` epochs a checkpoint is written; ``-r EPOCH`` goes on after it, under any plan and number of processes.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import colossalai
from colossalai.booster import Boosted, Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet18
from titans.model.vit import vit_lite_depth7_patch4_32

# name: the plugin, and the mixed precision
PLANS: dict[str, tuple[type[Plugin], str | None]] = {
    "torch_ddp": (TorchDDPPlugin, None),
    "torch_ddp_fp16": (TorchDDPPlugin, "fp16"),
    "torch_fsdp": (TorchFSDPPlugin, None),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-p", "--plugin", choices=PLANS, default="torch_ddp")
    parser.add_argument("-m", "--model", choices=["resnet", "vit"], default="resnet")
    parser.add_argument(
        "-r", "--resume", type=int, default=-1, help="go on after the checkpoint of this epoch"
    )
    parser.add_argument(
        "-c", "--checkpoint", type=Path, default=Path("checkpoint"), help="the folder for checkpoints"
    )
    parser.add_argument("-i", "--interval", type=int, default=5, help="epochs between checkpoints; 0: none")
    parser.add_argument("--target_acc", type=float, help="fail if the last test accuracy is lower")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps per epoch; by default, all images once")
    parser.add_argument("--batch_size", type=int, default=64, help="images per process and step")
    parser.add_argument(
        "--data", default=os.environ.get("DATA", "data"), help="where CIFAR-10 is (or is not)"
    )
    return parser.parse_args()


def build(args: argparse.Namespace, booster: Booster, steps: int) -> Boosted:
    """The parts of a plain PyTorch script, boosted."""
    optimizer: torch.optim.Optimizer
    if args.model == "resnet":
        model: nn.Module = resnet18(num_classes=10, small_images=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    else:
        model = vit_lite_depth7_patch4_32(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    scheduler = CosineAnnealingLR(optimizer, total_steps=max(1, args.epochs * steps))
    return booster.boost(model, optimizer, nn.CrossEntropyLoss(), lr_scheduler=scheduler)


def train_epoch(
    booster: Booster, parts: Boosted, loader: DataLoader, steps: int, device: torch.device
) -> Tensor:
    """The mean loss of this process."""
    model, optimizer, criterion, _, scheduler = parts
    assert criterion is not None
    assert scheduler is not None
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in itertools.islice(loader, steps):
        loss = criterion(model(images.to(device)), labels.to(device))
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        total += loss.detach()
    return total / steps


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader, batches: int | None, device: torch.device) -> float:
    """The share of test images, of all processes, that the model knows."""
    model.eval()
    counts = torch.zeros(2, device=device)  # right, all
    for images, labels in itertools.islice(loader, batches):
        guesses = model(images.to(device)).argmax(dim=-1)
        counts += torch.tensor([float((guesses == labels.to(device)).sum()), len(labels)], device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch(config={}, seed=0, verbose=False)
    coordinator = DistCoordinator()
    plugin, precision = PLANS[args.plugin]
    booster = Booster(mixed_precision=precision, plugin=plugin())
    assert booster.accelerator is not None
    device = booster.accelerator.device
    train, test = build_cifar(args.batch_size, args.data, padding=4, crop=32, resize=32)
    steps = min(args.steps or len(train), len(train))
    parts = build(args, booster, steps)
    scheduler = parts.lr_scheduler
    assert scheduler is not None

    files = {"model": args.checkpoint / args.model, "optimizer": args.checkpoint / f"{args.model}_optimizer"}
    scheduler_file = args.checkpoint / f"{args.model}_scheduler"
    if args.resume >= 0:
        booster.load_model(parts.model, f"{files['model']}_{args.resume}")
        booster.load_optimizer(parts.optimizer, f"{files['optimizer']}_{args.resume}")
        booster.load_lr_scheduler(scheduler, f"{scheduler_file}_{args.resume}.bin")
    result = 0.0
    for epoch in range(args.resume + 1, args.epochs):
        train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        loss = train_epoch(booster, parts, train, steps, device)
        dist.all_reduce(loss)
        result = accuracy(parts.model, test, args.steps, device)
        coordinator.print_on_master(
            f"Epoch {epoch} - train loss: {loss.item() / dist.get_world_size():.4f}, test accuracy: {result:.2%}"
        )
        if args.interval and (epoch + 1) % args.interval == 0:
            booster.save_model(parts.model, f"{files['model']}_{epoch}", shard=True, use_safetensors=True)
            booster.save_optimizer(parts.optimizer, f"{files['optimizer']}_{epoch}", shard=True)
            booster.save_lr_scheduler(scheduler, f"{scheduler_file}_{epoch}.bin")
    if args.target_acc is not None and result < args.target_acc:
        raise SystemExit(f"test accuracy {result:.2%} is below the target of {args.target_acc:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
