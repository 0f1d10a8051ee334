"""A run that survives: it saves every few steps, and goes on from its latest checkpoint when it is started
again.

    colossalai run --nproc_per_node 2 --max-restarts 3 examples/features/resume/train.py

Kill one of its processes (``kill -9``): all start again, and the losses are those of a run that was not
disturbed. Started again on another number of processes, it goes on with the same samples in the same order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.checkpoint_io import latest
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_current_device
from titans.utils.scripts import script_parser


def parse_args() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("checkpoints"), help="of the checkpoints (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the whole run (%(default)s)")
    parser.add_argument("--save_every", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--keep", type=int, default=2, help="so many checkpoints (%(default)s)")
    parser.add_argument("--background", action="store_true", help="write while training goes on")
    parser.add_argument(
        "--batch_size", type=int, default=32, help="samples of a step, over all processes (%(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="(%(default)s)")
    return parser.parse_args()


def spirals(samples: int = 640) -> TensorDataset:
    """Points of two spirals, and which of them each belongs to."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 2
    angles = torch.rand(samples, generator=generator) * 9
    turned = angles + torch.pi * labels
    points = torch.stack([angles * turned.cos(), angles * turned.sin()], 1) / 9
    return TensorDataset(points, labels)


def network(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    )


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    args = parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    plugin = TorchDDPPlugin()
    model = network(args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = plugin.prepare_dataloader(
        spirals(), batch_size=args.batch_size // dist.get_world_size(), shuffle=True, drop_last=True
    )
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, loader, lr_scheduler = booster.boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, CosineAnnealingLR(optimizer, total_steps=args.steps)
    )

    step = 0
    if latest(args.folder) is not None:  # weights, optimizer, rates, random numbers, the position in the data
        step = booster.load(args.folder)["step"]
        DistCoordinator().print_on_master(f"resumed after step {step}")
    while step < args.steps:
        for points, labels in loader:
            loss = criterion(model(points.to(get_current_device())), labels.to(get_current_device()))
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
            step += 1
            DistCoordinator().print_on_master(f"step {step} loss {mean_over_ranks(loss):.9f}")
            if step % args.save_every == 0 or step == args.steps:
                saved = booster.save(
                    args.folder / f"step-{step:06d}",
                    {"step": step},
                    keep=args.keep,
                    background=args.background,
                )
            if step == args.steps:
                saved.wait()
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
