"""Named axes over the ranks of a job: the one place where ranks become coordinates and process groups.

Every form of parallelism is an axis (``dp``, ``pp``, ``tp``, ``row`` ...).  Axes are written major first, so
in ``Mesh({"dp": 2, "tp": 4})`` the ranks 0-3 form the first ``tp`` group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Axes = tuple[str, ...]

DATA_AXIS, PIPELINE_AXIS = "dp", "pp"
EXPERT_AXES: Axes = ("ep", *(f"ep{i}" for i in range(1, 16)))
"""The axes over which experts lie on different ranks, one for each prime factor of their number of ranks: a
layer with fewer experts is cut over some of them.
"""
SEQUENCE_AXES: Axes = ("sp", "su")
"""The axes that cut the sequence: ``sp`` (a ring, or Ulysses alone) and, where both are used, ``su`` of
Ulysses within the ring.
"""
DATA_AXES: Axes = (DATA_AXIS, *EXPERT_AXES)
"""The axes whose ranks read different samples."""
ROW_AXES: Axes = (*DATA_AXES, *SEQUENCE_AXES)
"""The axes whose ranks have different tokens, and whole weights but for experts; all other axes of a launched
job, except the pipeline's, are tensor-parallel.  Its mesh is ``dp, ep, ep1 ..., pp, sp, su, tensor axes``,
major first, with the axes of experts and sequences only where the plan has them.
"""


def expert_axis_sizes(size: int) -> dict[str, int]:
    """The axes of ``size`` ranks that share experts, with their sizes: the prime factors, largest first."""
    factors, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        divisor += 1
    return dict(zip(EXPERT_AXES, reversed(factors), strict=False))


def mesh_coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The position of ``rank`` on every axis; no process group is needed."""
    coord = {}
    for axis, size in reversed(list(axes.items())):
        rank, coord[axis] = divmod(rank, size)
    return {axis: coord[axis] for axis in axes}


def mesh_groups(axes: Mapping[str, int], joined: Sequence[str]) -> list[list[int]]:
    """All groups of ranks that differ only on the axes ``joined``, each in rank order; no process group is
    needed.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(axes.values())):
        coord = mesh_coordinates(axes, rank)
        groups.setdefault(tuple(c for a, c in coord.items() if a not in joined), []).append(rank)
    return list(groups.values())


class Mesh:
    """The ranks of this job on named axes, with a size, a coordinate and a process group for each.

    ``torch.distributed`` must be initialized, and every rank must build the same mesh.  Axes of size 1 are
    allowed everywhere and cost no communication.
    """

    def __init__(self, axes: Mapping[str, int], device_type: str = "cpu") -> None:
        world = dist.get_world_size()
        arithmetic = " x ".join(f"{axis}={size}" for axis, size in axes.items()) or "no axes"
        if any(size < 1 for size in axes.values()):
            raise ValueError(f"every mesh axis needs a size of at least 1, got {arithmetic}")
        if math.prod(axes.values()) != world:
            raise ValueError(
                f"the mesh {arithmetic} has {math.prod(axes.values())} places, but the job has {world} ranks"
            )
        axes = dict(axes) or {"world": 1}
        self.size = axes
        self.rank = dist.get_rank()
        self.coord = mesh_coordinates(axes, self.rank)
        self.device_type = device_type
        if device_type == "cuda":
            # Unless CUDA has started, DeviceMesh would bind this process to the device LOCAL_RANK names,
            # which does not exist when several ranks share a GPU.
            torch.cuda.init()
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        _meshes.add(self)

    # A copied or unpickled layer stays on the mesh of this process: process groups cannot be copied.

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _mesh_like, (self.size, self.device_type)

    @property
    def axes(self) -> Axes:
        return tuple(self.size)

    def in_order(self, axes: Sequence[str]) -> Axes:
        """``axes`` in the order of the mesh, major first."""
        self._check(axes)
        return tuple(a for a in self.size if a in axes)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one only on ``axes``.

        A group of several axes is made at its first use, which every rank must reach.
        """
        # also a group of one axis is kept: every collective asks, and torch's answer takes time
        if axes not in self._groups:
            key = self.in_order(axes)
            if len(key) == 1:
                self._groups[axes] = self.device_mesh.get_group(key[0])
            elif key != axes:
                self._groups[axes] = self.group(*key)
            else:
                self._groups[axes] = self.device_mesh[key]._flatten().get_group()
        return self._groups[axes]

    def group_size(self, *axes: str) -> int:
        self._check(axes)
        return math.prod(self.size[a] for a in axes)

    def ranks(self, *axes: str) -> list[int]:
        """The global ranks of ``group(*axes)``, in the order of the group."""
        self._check(axes)
        return next(g for g in mesh_groups(self.size, axes) if self.rank in g)

    def _check(self, axes: Sequence[str]) -> None:
        if unknown := [a for a in axes if a not in self.size]:
            raise KeyError(f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(self.size)}")

    def __repr__(self) -> str:
        return (
            f"Mesh({', '.join(f'{a}={n}' for a, n in self.size.items())}; rank {self.rank} at {self.coord})"
        )


_meshes: WeakSet[Mesh] = WeakSet()


def _mesh_like(axes: dict[str, int], device_type: str) -> Mesh:
    for mesh in _meshes:
        if (mesh.size, mesh.device_type) == (axes, device_type):
            return mesh
    wanted = ", ".join(f"{a}={n}" for a, n in axes.items())
    raise RuntimeError(
        f"what is unpickled lies on a mesh ({wanted}) on {device_type}, and this process has no such mesh; "
        "launch with the same parallel plan first"
    )
