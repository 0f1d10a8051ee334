"""Train an image model with a booster: a plain PyTorch loop under a plan of your choice.

    colossalai run --nproc_per_node 2 examples/image/train_with_booster.py -p torch_fsdp \\
        --config examples/image/resnet/config_cpu.py

Every ``--interval`` epochs a checkpoint is written; ``-r EPOCH`` goes on after it, under any plan and number
of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist
from parts import batches, build_parser, build_parts, checkpoint_of, evaluate, mean
from torch import Tensor
from torch.utils.data import DataLoader

import colossalai
from colossalai.booster import Boosted, Booster
from colossalai.booster.plugin import Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.context import Config
from colossalai.core import global_context as gpc

# name: the plugin, and the mixed precision
PLANS: dict[str, tuple[type[Plugin], str | None]] = {
    "torch_ddp": (TorchDDPPlugin, None),
    "torch_ddp_fp16": (TorchDDPPlugin, "fp16"),
    "torch_fsdp": (TorchFSDPPlugin, None),
}
OF_INITIALIZE = ("fp16", "gradient_accumulation")  # what the plan, not the config, decides here


def parse_arguments() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument(
        "-p", "--plugin", choices=PLANS, default="torch_ddp", help="the plan (default: %(default)s)"
    )
    parser.add_argument(
        "-r", "--resume", type=int, default=-1, help="go on after the checkpoint of this epoch"
    )
    parser.add_argument(
        "-c",
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="the folder for checkpoints (default: ./%(default)s)",
    )
    parser.add_argument(
        "-i",
        "--interval",
        type=int,
        default=5,
        help="epochs between checkpoints; 0: none (default: %(default)s)",
    )
    parser.add_argument("--target_acc", type=float, help="fail if the last test accuracy is lower")
    args = parser.parse_args()
    if args.resume >= 0:
        checkpoint_of(parser, args.checkpoint, args.resume)
    if args.resume + 1 >= (epochs := Config.from_file(args.config).NUM_EPOCHS):
        parser.error(f"nothing is left after epoch {args.resume}: NUM_EPOCHS = {epochs} in {args.config}")
    return args


def train_epoch(booster: Booster, parts: Boosted, epoch: int) -> float:
    """The mean loss."""
    model, optimizer, criterion, loader, _ = parts
    assert isinstance(loader, DataLoader)
    assert criterion is not None
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    model.train()
    losses: list[Tensor] = []
    for images, labels in batches(loader, f"epoch {epoch}"):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        booster.backward(loss, optimizer)
        if norm := gpc.config.get("clip_grad_norm"):
            optimizer.clip_grad_by_norm(norm)
        optimizer.step()
        losses.append(loss.detach())
    return mean(losses)


def save(booster: Booster, parts: Boosted, folder: Path, epoch: int) -> None:
    booster.save_model(parts.model, folder / f"model_{epoch}", shard=True, use_safetensors=True)
    booster.save_optimizer(parts.optimizer, folder / f"optimizer_{epoch}", shard=True)
    assert parts.lr_scheduler is not None
    booster.save_lr_scheduler(parts.lr_scheduler, folder / f"lr_scheduler_{epoch}.bin")


def load(booster: Booster, parts: Boosted, folder: Path, epoch: int) -> None:
    booster.load_model(parts.model, folder / f"model_{epoch}")
    booster.load_optimizer(parts.optimizer, folder / f"optimizer_{epoch}")
    assert parts.lr_scheduler is not None
    booster.load_lr_scheduler(parts.lr_scheduler, folder / f"lr_scheduler_{epoch}.bin")


def main() -> None:
    args = parse_arguments()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    say = DistCoordinator().print_on_master
    plugin, precision = PLANS[args.plugin]
    if unused := [name for name in OF_INITIALIZE if name in gpc.config]:
        say(
            f"only colossalai.initialize reads {' and '.join(unused)} of the config; here -p {args.plugin}"
            " decides"
        )
    booster = Booster(mixed_precision=precision, plugin=plugin())
    model, optimizer, criterion, train, test, scheduler = build_parts(gpc.config, args.data)
    parts = booster.boost(model, optimizer, criterion, train, scheduler)
    if args.resume >= 0:
        load(booster, parts, args.checkpoint, args.resume)

    accuracy = 0.0
    for epoch in range(args.resume + 1, gpc.config.NUM_EPOCHS):
        loss = train_epoch(booster, parts, epoch)
        assert parts.lr_scheduler is not None
        parts.lr_scheduler.step()
        _, accuracy = evaluate(parts.model, parts.criterion, test)
        say(f"Epoch {epoch} - train loss: {loss:.4f}, test accuracy: {accuracy:.2%}")
        if args.interval and (epoch + 1) % args.interval == 0:
            save(booster, parts, args.checkpoint, epoch)
    if args.target_acc is not None and accuracy < args.target_acc:
        raise SystemExit(f"test accuracy {accuracy:.2%} is below the target of {args.target_acc:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
