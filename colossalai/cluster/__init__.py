"""Coordinating the processes of a job: ``DistCoordinator``, named process groups and named device meshes."""

from __future__ import annotations

from colossalai.cluster.dist_coordinator import DistCoordinator
from colossalai.cluster.managers import DeviceMeshInfo, DeviceMeshManager, ProcessGroupManager

__all__ = ["DeviceMeshInfo", "DeviceMeshManager", "DistCoordinator", "ProcessGroupManager"]
