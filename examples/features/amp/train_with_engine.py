"""Mixed precision with an engine: the ``fp16`` section of the config.

    colossalai run --nproc_per_node 1 examples/features/amp/train_with_engine.py --tiny \
        --config examples/features/amp/config/config_AMP_naive.py
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from parts import build, build_parser, describe

import colossalai
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc
from colossalai.utils import get_current_device


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).with_name("config") / "config_AMP_torch.py",
        help="one of config/ beside this file (%(default)s)",
    )
    args = parser.parse_args()
    colossalai.launch_from_torch(config=args.config, verbose=False)
    model, train_dataloader = build(args, gpc.config.BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, verbose=False
    )
    engine.train()
    for idx, (img, label) in enumerate(islice(train_dataloader, args.iterations)):
        engine.zero_grad()
        output = engine(img.to(get_current_device()))
        loss = engine.criterion(output, label.to(get_current_device()))
        engine.backward(loss)
        engine.step()
        DistCoordinator().print_on_master(describe(idx, loss.item(), engine.model, engine.optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
