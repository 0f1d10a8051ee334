"""Started by every launcher: prints who is in which group, and what an all-reduce in each group gives.

    report.py --launcher torch|slurm|openmpi [--host HOST --port PORT]

Rank 0 prints one line of JSON with the view of all ranks; it must not depend on the launcher.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc

CONFIG = {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}}


def launch() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", choices=["torch", "slurm", "openmpi"], required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    options: dict[str, Any] = {"backend": "gloo", "verbose": False}
    if args.launcher == "torch":
        colossalai.launch_from_torch(config=CONFIG, **options)
    elif args.launcher == "slurm":
        colossalai.launch_from_slurm(config=CONFIG, host=args.host, port=args.port, **options)
    else:
        colossalai.launch_from_openmpi(config=CONFIG, host=args.host, port=args.port, **options)


def groups() -> dict[str, dict[str, Any]]:
    found = {}
    for mode in ParallelMode:
        if gpc.is_initialized(mode):
            total = torch.tensor(2.0 ** dist.get_rank())  # each sum tells who took part
            dist.all_reduce(total, group=gpc.get_group(mode))
            found[mode.value] = {"ranks": list(gpc.get_ranks_in_group(mode)), "sum": total.item()}
    return found


def main() -> None:
    launch()
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, {"rank": gpc.get_global_rank(), "groups": groups()})
    if dist.get_rank() == 0:
        print("REPORT " + json.dumps(views, sort_keys=True), flush=True)
    gpc.destroy()


if __name__ == "__main__":
    main()
