"""What the tests of the core share: a process group, and what it means that pieces represent a tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import Layout, Mesh, collect, reduce, shard, unshard


def start(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")


def lay_out(full: Tensor, layout: Layout, mesh: Mesh, uneven: bool = False) -> Tensor:
    """This rank's piece of ``full``; on a partial axis the ranks get different summands, made without
    communication.
    """
    local = shard(full, layout, mesh, uneven=uneven)
    for axis in sorted(layout.partial):
        n, c = mesh.size[axis], mesh.coord[axis]
        local = local * (2.0 * (c + 1) / (n * (n + 1)))  # weights 1..n, which sum to 1
    return local


def represents(local: Tensor, layout: Layout, full: Tensor, mesh: Mesh, uneven: bool = False) -> None:
    """Assert that the pieces of all ranks represent ``full``, by the definition of the states."""
    value = local.detach()
    for axis in sorted(layout.partial):
        value = reduce(value, axis, mesh)
    torch.testing.assert_close(value, shard(full, layout, mesh, uneven=uneven), rtol=1e-5, atol=1e-6)


__all__ = ["Layout", "Mesh", "collect", "lay_out", "replace", "represents", "start", "unshard"]
