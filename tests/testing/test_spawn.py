from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from colossalai.testing import RankError, spawn


def _sum_of_ranks(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world_size))


def _one_rank_raises(rank: int, world_size: int, port: int) -> None:
    if rank == 1:
        raise ValueError("the reason")


def _one_rank_dies(rank: int, world_size: int, port: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ranks_reach_each_other(world_size: int) -> None:
    spawn(_sum_of_ranks, world_size)


def test_the_traceback_of_the_rank_that_raised_is_shown() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*ValueError: the reason"):
        spawn(_one_rank_raises, 2)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        spawn(_one_rank_dies, 2)
