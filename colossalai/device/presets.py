"""Common clusters, for plans that are made before there is a machine to measure.

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
