"""Gradient accumulation with an engine: the loop is as without it, and the weights move in every 4th
iteration.

colossalai run --nproc_per_node 1 examples/features/gradient_accumulation/run_resnet_cifar10_with_engine.py
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import colossalai
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet18
from titans.utils.scripts import image_parser


def main() -> None:
    args = image_parser(__doc__, Path(__file__).with_name("config.py")).parse_args()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    torch.set_printoptions(linewidth=200)

    model = resnet18(num_classes=10)
    train_dataloader, _ = build_cifar(gpc.config.BATCH_SIZE, args.data, padding=4, crop=32, resize=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, verbose=False
    )

    engine.train()
    param = next(engine.model.parameters())
    for idx, (img, label) in enumerate(islice(train_dataloader, gpc.config.gradient_accumulation)):
        engine.zero_grad()  # acts at the start of a group
        output = engine(img.to(get_current_device()))
        loss = engine.criterion(output, label.to(get_current_device()))
        engine.backward(loss)
        engine.step()  # acts at its end
        DistCoordinator().print_on_master(
            f"iteration {idx}, first 10 elements of param: {param.detach().flatten()[:10]}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
