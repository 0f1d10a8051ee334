"""``GroupMesh``: a mesh over some of the ranks of a job."""

from __future__ import annotations

import torch.distributed as dist

from colossalai.mesh.mesh import Axes, Mesh, mesh_coordinates, mesh_groups


class GroupMesh(Mesh):
    """A mesh over some of the ranks of a job; each rank makes only the groups that it belongs to.

    All members must make the same mesh; the other ranks of the job need not know about it.
    """

    def __init__(self, ranks: tuple[int, ...], axes: dict[str, int], device_type: str) -> None:
        self.size = axes
        self.members = ranks
        self.rank = dist.get_rank()
        self.coord = mesh_coordinates(axes, ranks.index(self.rank))
        self.device_type = device_type
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        for axis in axes:  # every rank looks at the groups of all ranks, or some would wait for others
            for places in mesh_groups(axes, (axis,)):
                if (found := [ranks[place] for place in places]) != sorted(found):
                    # torch sorts the ranks of a group, and pieces would come in another order than they lie
                    raise ValueError(
                        f"the ranks {found} of axis {axis!r} do not ascend, and process groups of torch do;"
                        " give the ranks in an order in which they ascend along every axis"
                    )
        for axis, size in axes.items():
            if size > 1:  # a group of one rank waits for no other, so it can be made at its first use
                self.group(axis)

    def group(self, *axes: str) -> dist.ProcessGroup:
        key = self.in_order(axes)
        if key not in self._groups:
            self._groups[key] = new_group(self.ranks(*key))
        return self._groups[key]

    def ranks(self, *axes: str) -> list[int]:
        self._check(axes)
        own = self.members.index(self.rank)
        places = next(group for group in mesh_groups(self.size, axes) if own in group)
        return [self.members[place] for place in places]


def new_group(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
    """A process group of ``ranks``, in ascending order, that only its members make."""
    if backend is None and len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)
