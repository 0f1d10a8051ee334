"""One rank of a job that does not exist: groups, meshes and plans of any size in a single process.

The groups are real, with torch's own ``fake`` backend: collectives return at once and move nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colossalai.context.parallel_context import global_context as gpc


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` ranks.

    Groups and meshes are real; collectives return at once and move nothing.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"fake_world needs a rank from 0 to {world_size - 1}, got {rank}")
    if dist.is_initialized():
        raise RuntimeError("fake_world needs a process without a process group, but one is initialized")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def fake_launch(config: Mapping[str, Any] | str | Path | None, rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is ``rank`` as ``colossalai.launch(config)`` would have made it; random seeds are
    left alone.
    """
    with fake_world(rank, world_size):
        try:
            gpc.verbose = False
            gpc.load_config(config)
            gpc.take_place(rank, world_size)
            gpc.init_parallel_groups()
            yield
        finally:
            gpc.destroy()
