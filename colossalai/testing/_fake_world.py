"""One rank of a world that does not exist, for layouts and meshes of any size in a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of ``world_size`` ranks.  Groups and meshes are real; collectives return at once and move nothing."""
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
