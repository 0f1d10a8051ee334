"""Gradient clipping with a booster: ``optimizer.clip_grad_by_norm`` between the backward pass and the step.

    colossalai run --nproc_per_node 1 examples/features/gradient_clipping/train.py

On a GPU it computes in fp16, where clipping by hand would see gradients multiplied by the loss scale.
"""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet34
from titans.utils.scripts import image_parser

GRADIENT_CLIPPING = 0.1
ITERATIONS = 4


def main() -> None:
    parser = image_parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=128, help="images per process (%(default)s)")
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)

    model = resnet34(num_classes=10)
    train_dataloader, _ = build_cifar(args.batch_size, args.data, padding=4, crop=32, resize=32)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=ITERATIONS)
    booster = Booster(
        mixed_precision="fp16" if torch.cuda.is_available() else None,  # slow on a CPU
        plugin=TorchDDPPlugin(),
    )
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion, train_dataloader, lr_scheduler
    )

    model.train()
    for idx, (img, label) in enumerate(islice(train_dataloader, ITERATIONS)):
        optimizer.zero_grad()
        output = model(img.to(get_current_device()))
        train_loss = criterion(output, label.to(get_current_device()))
        booster.backward(train_loss, optimizer)
        before = optimizer.clip_grad_by_norm(max_norm=GRADIENT_CLIPPING)
        after = optimizer.clip_grad_by_norm(max_norm=float("inf"))  # clips nothing, returns the norm
        optimizer.step()
        lr_scheduler.step()
        ele_1st = next(model.parameters()).flatten()[0]
        DistCoordinator().print_on_master(
            f"iteration {idx}, loss: {train_loss.item():.4f}, 1st element of parameters:"
            f" {ele_1st.item():.6f}, gradient norm: {before.item():.4f}, after clipping: {after.item():.4f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
