"""``barrier_context``: one rank of a group goes first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import colossalai
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.testing import spawn
from titans.utils import barrier_context


def run(rank: int, world_size: int, port: int, folder: str) -> None:
    colossalai.launch_from_torch(config={"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    made = Path(folder, "made")
    with barrier_context():
        if rank == 0:
            made.write_text("by rank 0")
        assert made.is_file(), "a rank came before the executor was done"
    dist.barrier()
    # in the tensor groups (0, 1) and (2, 3), local rank 1 goes first
    local = Path(folder, f"group{rank // 2}")
    with barrier_context(executor_rank=1, parallel_mode=ParallelMode.TENSOR):
        if gpc.get_local_rank(ParallelMode.TENSOR) == 1:
            local.write_text(str(rank))
        assert local.read_text() == str(rank // 2 * 2 + 1)
    with pytest.raises(ValueError, match=r"executor_rank 5 is not a rank"), barrier_context(executor_rank=5):
        pass


def test_the_executor_goes_first(tmp_path: Path) -> None:
    spawn(run, 4, folder=str(tmp_path))
