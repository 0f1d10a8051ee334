"""``ProcessGroupManager`` and ``DeviceMeshManager``: process groups and device meshes by names of the user's
choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colossalai.cluster._common import NameTable, check_ranks, destroy_group, require_job


class ProcessGroupManager:
    """Named process groups.  Every rank of the job must make the same calls in the same order."""

    def __init__(self) -> None:
        self._groups = NameTable[dist.ProcessGroup]("process group")

    def create_process_group(
        self, name: str, ranks: Sequence[int], backend: str | None = None
    ) -> dist.ProcessGroup:
        """Make the group ``name`` of ``ranks``; without ``backend`` it uses that of the job.

        A rank outside of ``ranks`` makes the call too and gets ``GroupMember.NON_GROUP_MEMBER``.
        """
        require_job("create_process_group")
        self._groups.check_free(name)
        check_ranks(f"the process group {name!r}", list(ranks))
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError(
                f"the process group {name!r} cannot use nccl: this process sees no CUDA device; use"
                " backend='gloo'"
            )
        group = dist.new_group(list(ranks), backend=backend)
        self._groups.add(name, group)
        return group

    def get(self, name: str) -> dist.ProcessGroup:
        """The group called ``name``."""
        return self._groups.get(name)

    def destroy(self, name: str) -> None:
        """Destroy the group called ``name`` and forget it."""
        destroy_group(self._groups.pop(name))

    def destroy_all(self) -> None:
        """Destroy all groups of this manager."""
        for name in self._groups.names():
            self.destroy(name)


# Device meshes of torch by name.
#
# The parallel plans of this package use ``colossalai.mesh.Mesh``; this is for scripts that work with
# torch's ``DeviceMesh`` (DTensor, FSDP2) themselves.


@dataclass(frozen=True)
class DeviceMeshInfo:
    """The global ranks of a mesh, in row-major order, and its shape; without a shape the mesh has one dim."""

    physical_ids: Sequence[int]
    mesh_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.mesh_shape is None:
            return
        if any(size < 1 for size in self.mesh_shape) or math.prod(self.mesh_shape) != len(self.physical_ids):
            shape = " x ".join(str(size) for size in self.mesh_shape)
            raise ValueError(
                f"a device mesh of shape {shape} has {math.prod(self.mesh_shape)} places, "
                f"but {len(self.physical_ids)} physical ids were given"
            )


class DeviceMeshManager:
    """Named device meshes.  Every rank of the job must make the same calls in the same order."""

    def __init__(self) -> None:
        self._meshes = NameTable[DeviceMesh]("device mesh")

    def create_device_mesh(self, name: str, device_mesh_info: DeviceMeshInfo) -> DeviceMesh:
        """Make the mesh ``name``, on CUDA devices when there are any and on CPUs otherwise."""
        require_job("create_device_mesh")
        self._meshes.check_free(name)
        ranks = list(device_mesh_info.physical_ids)
        check_ranks(f"the device mesh {name!r}", ranks)
        shape = device_mesh_info.mesh_shape
        places = torch.tensor(ranks, dtype=torch.int).view(*(shape if shape is not None else [len(ranks)]))
        if torch.cuda.is_available():
            torch.cuda.init()  # otherwise DeviceMesh would bind this process to the device number LOCAL_RANK
        mesh = DeviceMesh("cuda" if torch.cuda.is_available() else "cpu", places)
        self._meshes.add(name, mesh)
        return mesh

    def get(self, name: str) -> DeviceMesh:
        """The mesh called ``name``."""
        return self._meshes.get(name)

    def destroy(self, name: str) -> None:
        """Destroy the process groups of the mesh called ``name`` and forget it."""
        mesh = self._meshes.pop(name)
        if mesh.get_coordinate() is not None:  # a rank outside of the mesh has no groups of it
            for group in mesh.get_all_groups():
                destroy_group(group)

    def destroy_all(self) -> None:
        """Destroy all meshes of this manager."""
        for name in self._meshes.names():
            self.destroy(name)
