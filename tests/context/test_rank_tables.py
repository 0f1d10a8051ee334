"""The process groups that real ranks get: each group is asked who is in it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.context import ParallelMode, rank_table
from colossalai.context.random import get_seeds
from colossalai.core import global_context as gpc
from colossalai.global_variables import tensor_parallel_env
from colossalai.testing import spawn

from .tables import TABLES, Case, as_groups


def check_group(mode: ParallelMode, expected: list[list[int]], rank: int) -> None:
    mine = next(group for group in expected if rank in group)
    for group in (gpc.get_group(mode), gpc.get_cpu_group(mode)):
        found = [torch.zeros(1, dtype=torch.int64) for _ in mine]
        dist.all_gather(found, torch.tensor([rank]), group=group)
        assert [int(r) for r in found] == mine, (mode, found)
    place = mine.index(rank)
    assert gpc.get_ranks_in_group(mode) == mine
    assert gpc.get_world_size(mode) == len(mine)
    assert gpc.get_local_rank(mode) == place
    assert gpc.get_next_global_rank(mode) == mine[(place + 1) % len(mine)]
    assert gpc.get_prev_global_rank(mode) == mine[place - 1]
    assert gpc.is_first_rank(mode) == (rank == mine[0])
    assert gpc.is_last_rank(mode) == (rank == mine[-1])


def check_case(case: Case, rank: int, port: int) -> None:
    colossalai.launch({"parallel": case.parallel}, rank, case.world_size, "localhost", port, verbose=False)
    expected = as_groups(case)
    for mode in ParallelMode:
        assert gpc.is_initialized(mode) == (mode.name in expected)
        if mode.name in expected:
            check_group(mode, expected[mode.name], rank)
    assert {
        mode.name: groups for mode, groups in rank_table(case.parallel, case.world_size).items()
    } == expected
    sizes = gpc.data_parallel_size, gpc.pipeline_parallel_size, gpc.tensor_parallel_size
    assert sizes == tuple(len(expected[name][0]) for name in ("DATA", "PIPELINE", "TENSOR"))
    assert gpc.world_size == gpc.num_processes_on_current_node == case.world_size
    assert get_seeds() == {
        ParallelMode.DATA: 1024,
        ParallelMode.TENSOR: 1024
        + gpc.get_local_rank(ParallelMode.TENSOR)
        + 1024 * gpc.get_local_rank(ParallelMode.PIPELINE),
    }
    assert tensor_parallel_env.mode == case.parallel.get("tensor", {}).get("mode")


def check_world(rank: int, world_size: int, port: int, names: list[str]) -> None:
    """All cases of one world size on the same ranks, which also launches again after ``destroy``."""
    for case in TABLES:
        if str(case) in names:
            check_case(case, rank, port)
            gpc.destroy()
            assert not dist.is_initialized()
            assert tensor_parallel_env.mode is None


def cases_of(world_size: int) -> list[str]:
    return [str(case) for case in TABLES if case.world_size == world_size]


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_groups_of_real_ranks(world_size: int) -> None:
    # 16 processes on a small machine are slow: one case with all three kinds, one with joined axes
    names = ["16-pp2-2d4", "16-pp1-2.5d8"] if world_size == 16 else cases_of(world_size)
    assert set(names) <= set(cases_of(world_size))
    spawn(check_world, world_size, names=names)


@pytest.mark.slow
def test_groups_of_all_cases_with_16_ranks() -> None:
    spawn(check_world, 16, names=cases_of(16), timeout=300)
