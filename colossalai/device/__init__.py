"""What communication costs on a cluster: grids of devices with prices, measured or known.

``device_mesh`` (a grid and the cost of each collective on it), ``measure`` (alpha and beta of the axes of a
mesh, and the speed of CPUs), ``alpha_beta_profiler`` (pairs of devices, and the grid that fits them),
``presets`` (common clusters), ``stages`` (which part of a cluster each pipeline stage gets).
"""

from colossalai.device.alpha_beta_profiler import AlphaBetaProfiler
from colossalai.device.device_mesh import DeviceMesh
from colossalai.device.measure import Timing, measure_axis, measure_cpu, measure_links
from colossalai.device.presets import CLUSTERS, ClusterPreset, cluster_preset
from colossalai.device.stages import alpa_dp, get_submesh_choices

__all__ = [
    "CLUSTERS",
    "AlphaBetaProfiler",
    "ClusterPreset",
    "DeviceMesh",
    "Timing",
    "alpa_dp",
    "cluster_preset",
    "get_submesh_choices",
    "measure_axis",
    "measure_cpu",
    "measure_links",
]
