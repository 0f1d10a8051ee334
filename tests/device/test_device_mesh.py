"""``DeviceMesh``: documented costs, places of ranks, process groups, and a mesh that moves tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossalai.device import CLUSTERS, cluster_preset
from colossalai.device.device_mesh import DeviceMesh
from colossalai.mesh import Layout, redistribute, shard
from colossalai.testing import spawn
from tests.mesh.world import start


def test_documented_costs() -> None:
    mesh = DeviceMesh(torch.arange(16), mesh_shape=(4, 4), mesh_alpha=[1, 1], mesh_beta=[1, 1])
    assert mesh.all_gather_cost(2**20, 0) == pytest.approx(786433.1)
    assert mesh.all_reduce_cost(2**20, 1) == pytest.approx(1572865.01)
    assert mesh.reduce_scatter_cost(2**20, 0) == pytest.approx(786433.001)
    assert mesh.all_to_all_cost(2**20, -1) == pytest.approx(393217.001)


def test_places_of_ranks() -> None:
    mesh = DeviceMesh(torch.arange(6), mesh_shape=(2, 3))
    assert tuple(mesh.shape) == (2, 3)
    assert mesh.num_devices == 6
    assert mesh.convert_map[4] == mesh.global_rank_to_logical_rank(4) == [1, 1]
    assert mesh.global_rank_to_process_groups_with_logical_rank(4) == {
        0: [[0, 1], [1, 1]],
        1: [[1, 0], [1, 1], [1, 2]],
    }
    assert mesh.global_rank_to_process_groups_with_global_rank(4) == {0: [1, 4], 1: [3, 4, 5]}
    flat = mesh.flatten()
    assert flat.logical_mesh_id.tolist() == list(range(6))
    assert flat.global_rank_to_logical_rank(4) == [4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh_shape": (2, 3)}, "6 places, but physical_mesh_id names 4"),
        ({"logical_mesh_id": torch.tensor([[0, 1], [2, 2]])}, "must hold the ranks of physical_mesh_id"),
        ({"logical_mesh_id": torch.arange(4).view(2, 2), "mesh_shape": (4,)}, "leave one of them out"),
        ({"mesh_shape": (2, 2), "mesh_alpha": [1]}, "mesh_alpha needs one number for each of the 2"),
        ({"mesh_alpha": [-1]}, "mesh_alpha has the seconds of each axis, at least 0 and finite, got -1"),
        ({"mesh_beta": [float("nan")]}, "mesh_beta has the seconds of each axis, .* got nan"),
    ],
)
def test_grids_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceMesh(torch.arange(4), **arguments)


def test_questions_that_are_refused() -> None:
    mesh = DeviceMesh(torch.arange(4), mesh_shape=(2, 2))
    with pytest.raises(ValueError, match="mesh_dim=2"):
        mesh.all_gather_cost(1, 2)
    for nbytes in (-5, float("nan")):
        with pytest.raises(ValueError, match=f"num_bytes={nbytes} must be the bytes of a tensor"):
            mesh.all_gather_cost(nbytes, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 7 is not on this mesh"):
        mesh.global_rank_to_logical_rank(7)
    with pytest.raises(RuntimeError, match=r"call colossalai\.launch first"):
        _ = mesh.mesh
    with pytest.raises(ValueError, match="names a rank twice"):
        DeviceMesh(torch.zeros(2))
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match=f"the numbers of ranks, 0 and up, got {wrong}"):
            DeviceMesh(torch.tensor([wrong, 1]))


def test_clusters() -> None:
    for name in CLUSTERS:
        mesh = cluster_preset(name).device_mesh(nodes=2)
        between, within = (mesh.links[axis] for axis in "01")
        assert between.ranks == 2
        assert between.beta > within.beta
        assert between.alpha > within.alpha
    with pytest.raises(ValueError, match="there is no cluster 'a100'; there are v100-nvlink"):
        cluster_preset("a100")


def _move(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    grid = torch.tensor([[0, 2], [1, 3]])
    mesh = DeviceMesh(torch.arange(4), logical_mesh_id=grid, init_process_group=True)
    assert [ranks for ranks, _ in mesh.process_groups_dict[0]] == [[0, 1], [2, 3]]
    assert [ranks for ranks, _ in mesh.process_groups_dict[1]] == [[0, 2], [1, 3]]
    for lines in mesh.process_groups_dict.values():
        own = [(ranks, group) for ranks, group in lines if group is not None]
        assert [ranks for ranks, _ in own] == [dist.get_process_group_ranks(own[0][1])]
        assert rank in own[0][0]
    x = torch.arange(24.0).view(4, 6)
    src, dst = Layout((("0", "1"), ())), Layout(((), ("1",)))
    moved = redistribute(shard(x, src, mesh.mesh), src, dst, mesh.mesh, None, mesh.links)
    assert torch.equal(moved, x[:, :3] if mesh.convert_map[rank][1] == 0 else x[:, 3:])
    backwards = DeviceMesh(torch.arange(4), logical_mesh_id=torch.tensor([[1, 0], [2, 3]]))
    with pytest.raises(ValueError, match="do not ascend"):
        _ = backwards.mesh
    with pytest.raises(ValueError, match="rank 9 is not in this job"):
        _ = DeviceMesh(torch.tensor([*range(4), 9])).mesh


def test_a_grid_in_another_order() -> None:
    spawn(_move, 4)
