"""Gradient accumulation with a booster: gradients come together under ``no_sync``, the 4th pass exchanges
them and steps.

colossalai run --nproc_per_node 1 examples/features/gradient_accumulation/train.py
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice, pairwise

import torch
import torch.distributed as dist

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.utils import get_current_device
from titans.dataloader.cifar10 import build_cifar
from titans.model.resnet import resnet18
from titans.utils.scripts import image_parser

GRADIENT_ACCUMULATION = 4


def main() -> None:
    parser = image_parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=128, help="images per process (%(default)s)")
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    torch.set_printoptions(linewidth=200)
    say = DistCoordinator().print_on_master

    model = resnet18(num_classes=10)
    train_dataloader, _ = build_cifar(args.batch_size, args.data, padding=4, crop=32, resize=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    criterion = torch.nn.CrossEntropyLoss()
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model, optimizer, criterion, train_dataloader
    )

    param = next(model.parameters())
    values = [param.detach().flatten()[:10].clone()]
    optimizer.zero_grad()
    for idx, (img, label) in enumerate(islice(train_dataloader, GRADIENT_ACCUMULATION)):
        last = (idx + 1) % GRADIENT_ACCUMULATION == 0
        with nullcontext() if last else booster.no_sync(model):
            output = model(img.to(get_current_device()))
            loss = criterion(output, label.to(get_current_device()))
            booster.backward(loss / GRADIENT_ACCUMULATION, optimizer)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        values.append(param.detach().flatten()[:10].clone())
        say(f"iteration {idx}, first 10 elements of param: {values[-1]}")
    moved = [not torch.equal(before, after) for before, after in pairwise(values)]
    if moved == [False] * (GRADIENT_ACCUMULATION - 1) + [True]:
        say("The parameter is only updated in the last iteration")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
