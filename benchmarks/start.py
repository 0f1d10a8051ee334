"""How long a user waits before anything happens: importing the package, starting ranks."""

from __future__ import annotations

import subprocess
import sys

import torch.distributed as dist
import torch.multiprocessing

from benchmarks.table import Row, milliseconds
from colossalai.testing import free_port, spawn

RANKS = 8


def _import(code: str) -> float:
    return milliseconds(lambda: subprocess.run([sys.executable, "-c", code], check=True), repeat=3)


def _ours(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo")


def _peer(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    dist.destroy_process_group()


def rows() -> list[Row]:
    peer = milliseconds(
        lambda: torch.multiprocessing.spawn(_peer, args=(free_port(),), nprocs=RANKS), repeat=1
    )
    return [
        Row(
            "import colossalai", _import("import torch, colossalai"), _import("import torch"), "import torch"
        ),
        Row(
            f"start {RANKS} gloo ranks",
            milliseconds(lambda: spawn(_ours, RANKS), repeat=3),
            peer,
            "torch.multiprocessing.spawn",
        ),
    ]
