"""The test accuracy of a checkpoint that ``train_with_booster.py`` has written.

    colossalai run --nproc_per_node 2 examples/image/eval.py -e 3 -c ./checkpoint \\
        --config examples/image/resnet/config_cpu.py

Any number of processes will do, whatever plan wrote it.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from parts import build_parser, build_parts, checkpoint_of, evaluate

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.core import global_context as gpc


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("-e", "--epoch", type=int, required=True, help="the epoch whose checkpoint to load")
    parser.add_argument(
        "-c",
        "--checkpoint",
        type=Path,
        default=Path("checkpoint"),
        help="the folder of the checkpoints (default: ./%(default)s)",
    )
    args = parser.parse_args()
    path = checkpoint_of(parser, args.checkpoint, args.epoch)
    colossalai.launch_from_torch(config=args.config, verbose=False)
    model, optimizer, criterion, _, test, _ = build_parts(gpc.config, args.data)
    booster = Booster(plugin=TorchDDPPlugin())
    model, _, criterion, _, _ = booster.boost(model, optimizer, criterion)
    booster.load_model(model, path)
    loss, accuracy = evaluate(model, criterion, test)
    DistCoordinator().print_on_master(
        f"Epoch {args.epoch} - test loss: {loss:.4f}, test accuracy: {accuracy:.2%}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
