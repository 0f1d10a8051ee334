from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from colossalai.mesh import Mesh
from colossalai.testing import fake_world


@pytest.mark.parametrize("world_size", [16, 1024])
def test_a_mesh_of_many_ranks_in_one_process(world_size: int) -> None:
    rank = world_size - 3
    with fake_world(rank, world_size):
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        mesh = Mesh({"dp": world_size // 8, "pp": 2, "tp": 4})
        assert mesh.coord == {"dp": world_size // 8 - 1, "pp": 1, "tp": 1}
        assert mesh.ranks("tp") == [rank - 1, rank, rank + 1, rank + 2]
        assert dist.get_world_size(mesh.group("dp")) == world_size // 8
        x = torch.ones(2)
        dist.all_reduce(x, group=mesh.group("tp"))  # returns at once
    assert not dist.is_initialized()


def test_worlds_follow_each_other_also_after_an_error() -> None:
    with pytest.raises(KeyError), fake_world(1, 4):
        raise KeyError
    with fake_world(0, 8):
        assert dist.get_world_size() == 8


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"needs a rank from 0 to 3, got {rank}"), fake_world(rank, 4):
        pass


def test_a_world_inside_another_is_refused() -> None:
    with fake_world(0, 2):
        with (
            pytest.raises(RuntimeError, match="without a process group, but one is initialized"),
            fake_world(0, 2),
        ):
            pass
        assert dist.get_world_size() == 2
