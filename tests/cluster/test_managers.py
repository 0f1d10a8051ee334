from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from colossalai.cluster import DeviceMeshInfo, DeviceMeshManager, ProcessGroupManager
from colossalai.testing import spawn


def _start(rank: int, world_size: int, port: int, prefix: str = "job") -> None:
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)


def _sum(rank: int, group: dist.ProcessGroup) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=group)
    return x.item()


def _process_groups(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port, "first")
    manager = ProcessGroupManager()
    created = manager.create_process_group("upper", ranks=[2, 3], backend="gloo")
    manager.create_process_group("all", ranks=range(4))
    assert manager.get("upper") is created
    if rank >= 2:
        assert dist.get_process_group_ranks(created) == [2, 3]
        assert _sum(rank, created) == 5
    else:
        assert created is dist.GroupMember.NON_GROUP_MEMBER
    assert _sum(rank, manager.get("all")) == 6

    manager.destroy("upper")
    with pytest.raises(ValueError, match="there is no process group called 'upper'; there are: all"):
        manager.get("upper")
    assert _sum(rank, manager.get("all")) == 6
    dist.destroy_process_group(manager.get("all"))  # behind the manager's back
    manager.destroy("all")
    manager.create_process_group("upper", ranks=[2, 3])
    manager.destroy_all()
    with pytest.raises(ValueError, match="there are: none"):
        manager.get("upper")
    manager.create_process_group("stale", ranks=[0, 1])

    dist.destroy_process_group()
    manager.destroy_all()
    with pytest.raises(ValueError, match="no process group called 'stale'"):
        manager.get("stale")
    _start(rank, world_size, port, "second")
    manager.create_process_group("stale", ranks=[0, 3])
    if rank in (0, 3):
        assert _sum(rank, manager.get("stale")) == 3


def test_process_groups_by_name() -> None:
    spawn(_process_groups, 4)


def _bad_process_groups(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    manager = ProcessGroupManager()
    manager.create_process_group("tensor", ranks=[0, 1])
    with pytest.raises(ValueError, match="already a process group called 'tensor'; choose another name"):
        manager.create_process_group("tensor", ranks=[0])
    with pytest.raises(ValueError, match="no process group called 'tensors'; did you mean 'tensor'"):
        manager.get("tensors")
    with pytest.raises(ValueError, match="no process group called 'x'"):
        manager.destroy("x")
    for name in ("", None, 3):
        with pytest.raises(TypeError, match="name of a process group is a string that is not empty, got"):
            manager.create_process_group(name, ranks=[0])  # type: ignore[arg-type]
    for strange in (2, -1, "0", True):
        with pytest.raises(ValueError, match=rf"'x': {strange!r} is not a rank of this job, .* 0 to 1"):
            manager.create_process_group("x", ranks=[strange])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"'x' lists a rank twice: \[1, 1\]"):
        manager.create_process_group("x", ranks=[1, 1])
    with pytest.raises(ValueError, match="'x' needs at least one rank"):
        manager.create_process_group("x", ranks=[])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"'x' cannot use nccl: .* use backend='gloo'"):
            manager.create_process_group("x", ranks=[0, 1], backend="nccl")
    assert _sum(rank, manager.get("tensor")) == 1


def test_bad_process_groups_are_refused_before_communication() -> None:
    spawn(_bad_process_groups, 2)


def _device_meshes(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port, "first")
    manager = DeviceMeshManager()
    square = manager.create_device_mesh(
        "square", DeviceMeshInfo(physical_ids=[0, 1, 2, 3], mesh_shape=[2, 2])
    )
    assert manager.get("square") is square
    assert square.mesh.tolist() == [[0, 1], [2, 3]]
    assert _sum(rank, square.get_group(1)) == (1 if rank < 2 else 5)
    line = manager.create_device_mesh("line", DeviceMeshInfo([0, 1, 2, 3]))
    assert line.shape == (4,)
    part = manager.create_device_mesh("part", DeviceMeshInfo([3, 1]))
    assert part.get_coordinate() == {3: (0,), 1: (1,)}.get(rank)
    if rank in (1, 3):
        assert _sum(rank, part.get_group()) == 4

    manager.destroy("line")  # its group may be that of the whole job, which must survive
    with pytest.raises(ValueError, match="no device mesh called 'line'; there are: square, part"):
        manager.get("line")
    assert _sum(rank, dist.group.WORLD) == 6  # type: ignore[arg-type]
    groups = [] if part.get_coordinate() is None else part.get_all_groups()
    manager.destroy_all()
    for group in groups:
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(group)
    assert _sum(rank, dist.group.WORLD) == 6  # type: ignore[arg-type]
    manager.create_device_mesh("square", DeviceMeshInfo([0, 1, 2, 3], [4, 1]))

    dist.destroy_process_group()
    with pytest.raises(ValueError, match="no device mesh called 'square'"):
        manager.destroy("square")
    _start(rank, world_size, port, "second")
    again = manager.create_device_mesh("square", DeviceMeshInfo([0, 1, 2, 3], [2, 2]))
    assert _sum(rank, again.get_group(0)) == (2 if rank % 2 == 0 else 4)


def test_device_meshes_by_name() -> None:
    spawn(_device_meshes, 4)


def _bad_device_meshes(rank: int, world_size: int, port: int) -> None:
    _start(rank, world_size, port)
    manager = DeviceMeshManager()
    manager.create_device_mesh("mesh", DeviceMeshInfo([0, 1]))
    with pytest.raises(ValueError, match="already a device mesh called 'mesh'"):
        manager.create_device_mesh("mesh", DeviceMeshInfo([0, 1]))
    with pytest.raises(ValueError, match=r"device mesh 'x': 2 is not a rank of this job"):
        manager.create_device_mesh("x", DeviceMeshInfo([1, 2]))


def test_bad_device_meshes_are_refused() -> None:
    spawn(_bad_device_meshes, 2)


def test_a_shape_must_hold_the_ids() -> None:
    with pytest.raises(ValueError, match="shape 2 x 3 has 6 places, but 4 physical ids were given"):
        DeviceMeshInfo(physical_ids=[0, 1, 2, 3], mesh_shape=[2, 3])
    with pytest.raises(ValueError, match="shape -1 x -4 has 4 places"):
        DeviceMeshInfo(physical_ids=[0, 1, 2, 3], mesh_shape=[-1, -4])


def test_a_job_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"create_process_group needs torch.distributed"):
        ProcessGroupManager().create_process_group("x", ranks=[0])
    with pytest.raises(RuntimeError, match=r"create_device_mesh needs torch.distributed"):
        DeviceMeshManager().create_device_mesh("x", DeviceMeshInfo([0]))
