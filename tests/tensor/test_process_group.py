"""Who shares a tensor: the documented order of ranks, derived degrees, groups of some ranks, refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from colossalai.tensor import ProcessGroup
from colossalai.testing import fake_world, spawn
from tests.tensor.world import start


def test_the_documented_layout() -> None:
    """Page 17: 8 processes, tp_degree=4, dp_degree=2: tp0 holds 0-3, and dp1 holds 1 and 5."""
    with fake_world(rank=1, world_size=8):
        pg = ProcessGroup(tp_degree=4, dp_degree=2)
        assert pg.tp_rank_list() == pg.get_ranks_in_tp() == [0, 1, 2, 3]
        assert pg.dp_rank_list() == pg.get_ranks_in_dp() == [1, 5]
        assert (pg.tp_local_rank(), pg.dp_local_rank()) == (1, 0)
        assert (pg.tp_world_size(), pg.dp_world_size(), pg.world_size()) == (4, 2, 8)
        assert (pg.rank(), pg.ranks_in_group()) == (1, list(range(8)))
        assert repr(pg) == "ProcessGroup(ranks=[0, 1, 2, 3, 4, 5, 6, 7], tp_degree=4, dp_degree=2)"


def test_degrees_are_derived() -> None:
    with fake_world(rank=5, world_size=6):
        for given, degrees in [
            ({}, (1, 6)),
            ({"tp_degree": 2}, (2, 3)),
            ({"dp_degree": 2}, (3, 2)),
            ({"tp_degree": 6, "dp_degree": 1}, (6, 1)),
            ({"ranks": [5, 1], "tp_degree": 2, "rank": 5}, (2, 1)),
        ]:
            pg = ProcessGroup(**given)
            assert (pg.tp_world_size(), pg.dp_world_size()) == degrees
        assert pg.ranks_in_group() == pg.tp_rank_list() == [1, 5]
        assert pg.tp_local_rank() == 1


def test_equal_groups_share_their_communicators() -> None:
    with fake_world(rank=0, world_size=4):
        pg, same, other = ProcessGroup(tp_degree=2), ProcessGroup(dp_degree=2), ProcessGroup(tp_degree=4)
        assert pg == same
        assert hash(pg) == hash(same)
        assert pg != other
        assert pg.tp_process_group() is same.tp_process_group()
        assert pg.mesh is same.mesh
        assert copy.deepcopy(pg) is pg
        assert pickle.loads(pickle.dumps(pg)) == pg
    with fake_world(rank=0, world_size=4):
        assert ProcessGroup(tp_degree=2).mesh is not pg.mesh  # of another job


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tp_degree": 3},
            r"tp_degree=3, dp_degree=None\) over 4 ranks: a degree must be .* divides 4, got 3",
        ),
        ({"dp_degree": 0}, "a degree must be an integer from 1 that divides 4, got 0"),
        ({"tp_degree": 2.0}, "a degree must be an integer"),
        ({"tp_degree": 2, "dp_degree": 1}, r"2 x 1 = 2, not 4; leave one degree out"),
        (
            {"ranks": [0, 2]},
            r"rank 1 is not one of ProcessGroup\(ranks=\[0, 2\]\); each rank makes the process group",
        ),
        ({"ranks": [1, 1]}, "must name ranks from 0 to 3, each once"),
        ({"ranks": [1, 4]}, "must name ranks from 0 to 3, each once: the job has 4 ranks"),
        ({"rank": 2}, r"ProcessGroup\(rank=2\) is made by rank 1; leave rank out"),
    ],
)
def test_refusals(given: dict[str, object], message: str) -> None:
    with fake_world(rank=1, world_size=4), pytest.raises(ValueError, match=message):
        ProcessGroup(**given)  # type: ignore[arg-type]


def test_before_launch() -> None:
    with pytest.raises(RuntimeError, match=r"call colossalai\.launch first"):
        ProcessGroup()


def _halves(rank: int, world_size: int, port: int) -> None:
    """Two process groups of two ranks each, and one of three beside a single rank, at the same time."""
    start(rank, world_size, port)
    for ranks in ([0, 1] if rank < 2 else [2, 3], [0, 1, 3] if rank != 2 else [2]):
        pg = ProcessGroup(ranks=ranks, tp_degree=len(ranks))
        for group in (pg.tp_process_group(), pg.cpu_tp_process_group()):
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(ranks)
        pg.set_cpu_groups()
        assert pg.has_cpu_groups
        alone = torch.tensor([rank])
        for group in (pg.dp_process_group(), pg.cpu_dp_process_group()):
            dist.all_reduce(alone, group=group)
        assert alone.item() == rank


def test_groups_of_some_ranks() -> None:
    spawn(_halves, 4)


def test_host_memory_under_a_backend_that_does_not_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(rank=0, world_size=2):
        pg = ProcessGroup(tp_degree=2)
        monkeypatch.setattr("colossalai.tensor.process_group._serves_cpu", lambda: False)
        assert not pg.has_cpu_groups
        with pytest.raises(
            RuntimeError, match=r"does not serve tensors in host memory; call set_cpu_groups\(\)"
        ):
            pg.cpu_tp_process_group()
