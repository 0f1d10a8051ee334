"""Gradient clipping with an engine: ``clip_grad_norm`` in the config, and ``engine.step`` clips.

colossalai run --nproc_per_node 1 examples/features/gradient_clipping/train_with_engine.py
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

import colossalai
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet34
from titans.utils.scripts import image_parser


def main() -> None:
    args = image_parser(__doc__, Path(__file__).with_name("config.py")).parse_args()
    colossalai.launch_from_torch(config=args.config, verbose=False)

    model = resnet34(num_classes=10)
    train_dataloader, _ = build_cifar(gpc.config.BATCH_SIZE, args.data, padding=4, crop=32, resize=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, verbose=False
    )

    def gradient_norm() -> float:
        return get_total_norm([p.grad for p in engine.model.parameters() if p.grad is not None]).item()

    engine.train()
    for idx, (img, label) in enumerate(islice(train_dataloader, 4)):
        engine.zero_grad()
        output = engine(img.to(get_current_device()))
        loss = engine.criterion(output, label.to(get_current_device()))
        engine.backward(loss)
        before = gradient_norm()
        engine.step()
        DistCoordinator().print_on_master(
            f"iteration {idx}, loss: {loss.item():.4f}, gradient norm: {before:.4f}, after clipping:"
            f" {gradient_norm():.4f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
