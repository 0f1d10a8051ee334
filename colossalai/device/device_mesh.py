"""``DeviceMesh``: the devices of a job as a grid without names, with the cost of every collective on each of
its axes.

It is the form in which older scripts describe a cluster.  Sizes and costs need no process group; ``mesh`` is
the same grid as a mesh of :mod:`colossalai.mesh`, on which tensors are moved: its axes are called "0", "1",
and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.mesh import AxisLink, GroupMesh
from colossalai.mesh.collectives import Kind

if TYPE_CHECKING:
    from colossalai.device.presets import DevicePreset

# The documents add these to every cost, so that of collectives that would cost the same, a strategy takes the
# one with the smaller number.  They are no seconds, so the links of ``links`` do not have them.
_PREFERENCE: dict[Kind, float] = {
    "all_gather": 0.1,
    "all_reduce": 0.01,
    "reduce_scatter": 0.001,
    "all_to_all": 0.001,
}


class DeviceMesh:
    """A grid of devices, named by their global ranks.

    Args:
        physical_mesh_id: the global ranks, in any shape.
        mesh_shape: the shape of the grid, filled row by row; or give ``logical_mesh_id``.
        logical_mesh_id: the global ranks as they lie on the grid.
        mesh_alpha: for every axis the latency of a collective, in seconds (1 by default).
        mesh_beta: for every axis the seconds for each byte that a rank sends (1 by default).
        init_process_group: make the process groups now; every rank of the mesh must do it.
        need_flatten: make the grid with one axis (``flatten()``) now as well.
    """

    def __init__(
        self,
        physical_mesh_id: Tensor,
        mesh_shape: Sequence[int] | None = None,
        logical_mesh_id: Tensor | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        init_process_group: bool = False,
        need_flatten: bool = True,
    ) -> None:
        self.physical_mesh_id = torch.as_tensor(physical_mesh_id)
        self.logical_mesh_id = _logical(self.physical_mesh_id, mesh_shape, logical_mesh_id)
        self.mesh_alpha = _per_axis("mesh_alpha", mesh_alpha, self.logical_mesh_id.ndim)
        self.mesh_beta = _per_axis("mesh_beta", mesh_beta, self.logical_mesh_id.ndim)
        self.cpu: DevicePreset | None = None
        """How fast its CPUs are, where that was measured."""
        self.convert_map: dict[int, list[int]] = {
            int(self.logical_mesh_id[place]): list(place)
            for place in (tuple(p) for p in torch.ones(self.shape).nonzero().tolist())
        }
        """For every global rank its place on the grid."""
        self.process_groups_dict: dict[int, list[tuple[list[int], dist.ProcessGroup | None]]] = {}
        """For every axis all its groups of global ranks, with the process group where this rank has it."""
        self.flatten_device_mesh = self.flatten() if need_flatten and len(self.shape) > 1 else None
        if init_process_group:
            self.process_groups_dict = self.create_process_groups_for_logical_mesh()

    @property
    def shape(self) -> torch.Size:
        return self.logical_mesh_id.shape

    @property
    def num_devices(self) -> int:
        return self.logical_mesh_id.numel()

    def flatten(self) -> DeviceMesh:
        """The same devices on one axis, which is as slow as the slowest axis here."""
        flat = DeviceMesh(
            self.physical_mesh_id,
            logical_mesh_id=self.logical_mesh_id.flatten(),
            mesh_alpha=[max(self.mesh_alpha)],
            mesh_beta=[max(self.mesh_beta)],
            need_flatten=False,
        )
        flat.cpu = self.cpu
        return flat

    def global_rank_to_logical_rank(self, rank: int) -> list[int]:
        """The place of a global rank on the grid."""
        if rank not in self.convert_map:
            raise ValueError(f"rank {rank} is not on this mesh, whose ranks are {sorted(self.convert_map)}")
        return self.convert_map[rank]

    def global_rank_to_process_groups_with_logical_rank(self, rank: int) -> dict[int, list[list[int]]]:
        """For every axis the places of the ranks that differ from ``rank`` only there."""
        place = self.global_rank_to_logical_rank(rank)
        return {
            axis: [[*place[:axis], i, *place[axis + 1 :]] for i in range(size)]
            for axis, size in enumerate(self.shape)
        }

    def global_rank_to_process_groups_with_global_rank(self, rank: int) -> dict[int, list[int]]:
        """For every axis the global ranks that differ from ``rank`` only there."""
        groups = self.global_rank_to_process_groups_with_logical_rank(rank)
        return {
            axis: [int(self.logical_mesh_id[tuple(place)]) for place in places]
            for axis, places in groups.items()
        }

    def create_process_groups_for_logical_mesh(
        self,
    ) -> dict[int, list[tuple[list[int], dist.ProcessGroup | None]]]:
        """Make the process groups of every axis; each rank has the groups that it belongs to."""
        mesh, found = self.mesh, {}
        for axis in range(len(self.shape)):
            lines = self.logical_mesh_id.movedim(axis, -1).flatten(0, -2).tolist()
            found[axis] = [(line, mesh.group(str(axis)) if mesh.rank in line else None) for line in lines]
        return found

    @cached_property
    def mesh(self) -> GroupMesh:
        """The grid as a mesh with process groups, made at the first use, which all its ranks must reach."""
        if not dist.is_initialized():
            raise RuntimeError(
                "a DeviceMesh moves tensors only in a job: call colossalai.launch first (costs need no job)"
            )
        self.global_rank_to_logical_rank(dist.get_rank())  # refuses a rank that is not on the mesh
        if strange := [rank for rank in self.convert_map if not 0 <= rank < dist.get_world_size()]:
            raise ValueError(f"rank {strange[0]} is not in this job, which has {dist.get_world_size()} ranks")
        sizes = {str(axis): size for axis, size in enumerate(self.shape)}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return GroupMesh(tuple(self.logical_mesh_id.flatten().tolist()), sizes, device)

    @cached_property
    def links(self) -> dict[str, AxisLink]:
        """The costs of the axes, by their names in ``mesh``; what routes are searched with."""
        columns = zip(self.shape, self.mesh_alpha, self.mesh_beta, strict=True)
        # In an all-to-all, two ranks send to each other at the same time: half of what a ring takes.
        return {str(i): AxisLink(n, alpha, beta, beta / 2) for i, (n, alpha, beta) in enumerate(columns)}

    def all_gather_cost(self, num_bytes: int, mesh_dim: int) -> float:
        """Of gathering ``num_bytes``, all pieces together, along an axis."""
        return self._cost("all_gather", num_bytes, mesh_dim)

    def all_reduce_cost(self, num_bytes: int, mesh_dim: int) -> float:
        """Of adding up tensors of ``num_bytes`` along an axis."""
        return self._cost("all_reduce", num_bytes, mesh_dim)

    def reduce_scatter_cost(self, num_bytes: int, mesh_dim: int) -> float:
        """Of adding up tensors of ``num_bytes`` along an axis, where every rank keeps a piece."""
        return self._cost("reduce_scatter", num_bytes, mesh_dim)

    def all_to_all_cost(self, num_bytes: int, mesh_dim: int) -> float:
        """Of exchanging pieces along an axis between ranks that hold ``num_bytes`` each."""
        return self._cost("all_to_all", num_bytes, mesh_dim)

    def _cost(self, kind: Kind, num_bytes: int, mesh_dim: int) -> float:
        if not -len(self.shape) <= mesh_dim < len(self.shape):
            raise ValueError(f"mesh_dim={mesh_dim} is not an axis of a mesh of shape {tuple(self.shape)}")
        if not 0 <= num_bytes < math.inf:
            raise ValueError(f"num_bytes={num_bytes!r} must be the bytes of a tensor, at least 0 and finite")
        link = self.links[str(mesh_dim % len(self.shape))]
        return link.seconds(kind, num_bytes) + _PREFERENCE[kind]

    def __repr__(self) -> str:
        return f"DeviceMesh({self.logical_mesh_id.tolist()}, alpha={self.mesh_alpha}, beta={self.mesh_beta})"


def _logical(physical: Tensor, shape: Sequence[int] | None, logical: Tensor | None) -> Tensor:
    ranks = sorted(physical.flatten().tolist())
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"physical_mesh_id names a rank twice: {ranks}")
    if wrong := [rank for rank in ranks if rank < 0 or rank != int(rank)]:
        raise ValueError(
            f"physical_mesh_id has the numbers of ranks, 0 and up, got {wrong[0]!r}; give a tensor or a list"
            " such as torch.arange(4)"
        )
    if logical is not None:
        logical = torch.as_tensor(logical)
        if sorted(logical.flatten().tolist()) != ranks:
            raise ValueError(
                f"logical_mesh_id {logical.tolist()} must hold the ranks of physical_mesh_id, {ranks}, once"
            )
        if shape is not None and tuple(shape) != tuple(logical.shape):
            raise ValueError(
                f"mesh_shape {tuple(shape)} is not the shape of logical_mesh_id, {tuple(logical.shape)};"
                " leave one of them out"
            )
        return logical
    if shape is None:
        return physical
    if any(size < 1 for size in shape) or math.prod(shape) != physical.numel():
        raise ValueError(
            f"mesh_shape {tuple(shape)} has {math.prod(shape)} places, but physical_mesh_id names"
            f" {physical.numel()} ranks"
        )
    return physical.reshape(tuple(shape))


def _per_axis(name: str, values: Sequence[float] | None, axes: int) -> list[float]:
    found = [1.0] * axes if values is None else [float(value) for value in values]
    if len(found) != axes:
        raise ValueError(f"{name} needs one number for each of the {axes} axes, got {found}")
    if wrong := [value for value in found if not 0 <= value < math.inf]:
        raise ValueError(
            f"{name} has the seconds of each axis, at least 0 and finite, got {wrong[0]}; measure them with"
            " AlphaBetaProfiler, or leave it out"
        )
    return found
