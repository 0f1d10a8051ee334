"""Mixed precision with a booster: ``Booster(mixed_precision=...)``.

colossalai run --nproc_per_node 1 examples/features/amp/train.py --tiny --precision bf16
"""

from __future__ import annotations

from itertools import islice

import torch
import torch.distributed as dist
from parts import build, build_parser, describe

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.utils import get_current_device

PRECISIONS = ("fp32", "fp16", "fp16_naive", "fp16_apex", "bf16", "fp8")


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--batch_size", type=int, default=128, help="images per process (%(default)s)")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp16", help="fp8 needs a recent GPU (%(default)s)"
    )
    args = parser.parse_args()
    colossalai.launch_from_torch(config={}, verbose=False)
    model, train_dataloader = build(args, args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    booster = Booster(
        mixed_precision=None if args.precision == "fp32" else args.precision, plugin=TorchDDPPlugin()
    )
    model, optimizer, criterion, train_dataloader, _ = booster.boost(
        model, optimizer, criterion, train_dataloader
    )
    model.train()
    for idx, (img, label) in enumerate(islice(train_dataloader, args.iterations)):
        optimizer.zero_grad()
        output = model(img.to(get_current_device()))
        loss = criterion(output, label.to(get_current_device()))
        booster.backward(loss, optimizer)
        optimizer.step()
        DistCoordinator().print_on_master(describe(idx, loss.item(), model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
