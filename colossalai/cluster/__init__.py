"""Coordinating the processes of a job: ``DistCoordinator``, named process groups and named device meshes."""

from __future__ import annotations

from colossalai.cluster.device_mesh_manager import DeviceMeshInfo, DeviceMeshManager
from colossalai.cluster.dist_coordinator import DistCoordinator
from colossalai.cluster.process_group_manager import ProcessGroupManager

__all__ = ["DeviceMeshInfo", "DeviceMeshManager", "DistCoordinator", "ProcessGroupManager"]
