"""Common clusters and devices, for plans that are made before there is a machine to measure.

Bandwidths are what one device can send by the data sheets (of NVLink and of its share of the network);
latencies are typical of collectives.  What a job reaches is measured by ``colossalai check --bandwidth``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from colossalai.device.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ClusterPreset:
    """Nodes of equal devices: bytes per second that a device sends within its node and to others."""

    devices: int
    """Of one node."""
    within: float
    between: float
    latency_within: float = 10e-6
    latency_between: float = 25e-6

    def device_mesh(self, nodes: int = 1) -> DeviceMesh:
        """The grid (nodes, devices of a node) with its costs; no job is needed."""
        if nodes < 1:
            raise ValueError(f"a cluster has at least 1 node, got nodes={nodes}")
        return DeviceMesh(
            torch.arange(nodes * self.devices),
            mesh_shape=(nodes, self.devices),
            mesh_alpha=(self.latency_between, self.latency_within),
            mesh_beta=(1 / self.between, 1 / self.within),
        )


COMPUTE_PART, MEMORY_PART = 0.7, 0.8
"""What kernels reach of the peaks of a device."""


@dataclass(frozen=True)
class DevicePreset:
    """A device: operations per second in half precision and in fp32, and bytes per second of its memory and
    of its link to the host.
    """

    half: float
    single: float
    memory: float
    host: float
    launch: float = 4e-6
    """Seconds that the smallest operation takes."""
    workspace: int = 2 * 32 << 20
    """Bytes that libraries take for themselves: cuBLAS, once in the thread of each pass."""

    def seconds(self, operations: int, nbytes: int, dtype: torch.dtype) -> float:
        """The time of one operation: the longer of computing and of moving its bytes, both at the part of the
        peak that kernels reach.
        """
        peak = self.half if dtype.itemsize <= 2 else self.single
        return max(self.launch, operations / (COMPUTE_PART * peak), nbytes / (MEMORY_PART * self.memory))


DEVICES: dict[str, DevicePreset] = {
    "cpu": DevicePreset(half=1e11, single=1e11, memory=20e9, host=20e9, launch=2e-6, workspace=0),
    "v100": DevicePreset(half=125e12, single=15.7e12, memory=0.9e12, host=12e9),
    "a100": DevicePreset(half=312e12, single=19.5e12, memory=2.0e12, host=25e9),
    "h100": DevicePreset(half=989e12, single=67e12, memory=3.35e12, host=50e9),
    "h200": DevicePreset(half=989e12, single=67e12, memory=4.8e12, host=50e9),
    "b200": DevicePreset(half=2250e12, single=80e12, memory=8.0e12, host=50e9),
}


def device_preset(name: str) -> DevicePreset:
    """The device called ``name``, by a name of ours or of its vendor (``NVIDIA H200``)."""
    found = next((preset for key, preset in DEVICES.items() if key in name.lower()), None)
    if found is None:
        raise ValueError(f"there is no device {name!r}; there are {', '.join(DEVICES)}")
    return found


CLUSTERS: dict[str, ClusterPreset] = {
    "v100-nvlink": ClusterPreset(8, within=150e9, between=12.5e9 / 2),  # 4 x EDR for 8 GPUs
    "a100-nvlink": ClusterPreset(8, within=300e9, between=25e9),  # HDR for each GPU
    "a100-pcie": ClusterPreset(8, within=32e9, between=12.5e9 / 4),  # 2 x 100 Gb/s for 8 GPUs
    "h100-nvlink": ClusterPreset(8, within=450e9, between=50e9),  # NDR for each GPU
    "h200-nvlink": ClusterPreset(8, within=450e9, between=50e9),
    "b200-nvlink": ClusterPreset(8, within=900e9, between=50e9),
    "cpu-ethernet": ClusterPreset(2, within=10e9, between=1.25e9, latency_within=50e-6, latency_between=1e-4),
}


def cluster_preset(name: str) -> ClusterPreset:
    """The cluster called ``name``."""
    if name not in CLUSTERS:
        raise ValueError(f"there is no cluster {name!r}; there are {', '.join(CLUSTERS)}")
    return CLUSTERS[name]
