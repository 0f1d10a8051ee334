"""The mesh-and-layout core: cost of a move beside DTensor's, and of drawing weights beside torch's
generator.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.table import Row, milliseconds
from colossalai.mesh import Layout, Mesh, Normal, draw, random_key, redistribute
from colossalai.testing import spawn

SIZES = {"1 KiB": 256, "1 MiB": 1 << 18}


def _moves(rank: int, world_size: int, port: int, out: str) -> None:
    dist.init_process_group("gloo")
    mesh = Mesh({"tp": world_size})
    cut, whole = Layout((("tp",),)), Layout(((),), spread=frozenset({"tp"}))
    found = {}
    for name, n in SIZES.items():
        x = torch.ones(n // world_size)
        d = DTensor.from_local(x, mesh.device_mesh, [Shard(0)], run_check=False)
        ours = milliseconds(lambda x=x: redistribute(x, cut, whole, mesh), inner=20)
        peer = milliseconds(lambda d=d: d.redistribute(placements=[Replicate()]).to_local(), inner=20)
        found[name] = ours, peer
    if rank == 0:
        torch.save(found, out)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "moves.pt"
        spawn(_moves, 2, out=str(out))
        found = torch.load(out)
    result = [
        Row(f"all-gather of {name}, 2 ranks", *pair, "DTensor.redistribute") for name, pair in found.items()
    ]
    torch.set_num_threads(1)
    shape = (1024, 1024)
    weight = torch.empty(shape)
    ours = milliseconds(lambda: draw(Normal(0.0, 0.02), random_key(0, "w"), shape), repeat=5)
    peer = milliseconds(lambda: torch.nn.init.normal_(weight, 0.0, 0.02), repeat=5)
    result.append(Row("draw 1M normal weights", ours, peer, "torch.nn.init.normal_ (depends on the plan)"))
    return result
