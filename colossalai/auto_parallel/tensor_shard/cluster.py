"""``initialize_device_mesh``: the grid of devices over which a model is parallelized, with its costs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from colossalai.device import AlphaBetaProfiler, DeviceMesh, Timing, measure_cpu, measure_links
from colossalai.device.alpha_beta_profiler import slowest_links
from colossalai.device.presets import DEVICES, DevicePreset, device_preset

AlphaBetaDict = Mapping[tuple[int, int], tuple[float, float]]
_QUICK = Timing(warmup=2, repeat=5, latency_iters=5, sizes=(2**18, 2**21))


def initialize_device_mesh(
    world_size: int = -1,
    physical_devices: Sequence[int] | None = None,
    alpha_beta_dict: AlphaBetaDict | None = None,
    logical_mesh_shape: Sequence[int] | None = None,
    logical_mesh_id: torch.Tensor | None = None,
) -> DeviceMesh:
    """The devices of the job as a grid; every rank calls it, and all get the same costs.

    Args:
        world_size: the number of devices; by default that of the job.
        physical_devices: their global ranks; by default all.
        alpha_beta_dict: latency and seconds per byte of each pair of ranks; measured if it is not given.
        logical_mesh_shape: the shape of the grid; by default one whose rows have the fastest links.
        logical_mesh_id: the global ranks as they lie on the grid, instead of its shape.

    Where links are measured and the ranks compute on CPUs, these are measured, too.
    """
    devices = _devices(world_size, physical_devices)
    measures = alpha_beta_dict is None and _can_measure() and len(devices) > 1
    if logical_mesh_id is None and logical_mesh_shape is None:
        if len(devices) == 1 or (alpha_beta_dict is None and not measures):
            logical_mesh_shape = (1, len(devices))
        else:
            profiler = AlphaBetaProfiler(
                devices, alpha_beta_dict, warmup=_QUICK.warmup, repeat=_QUICK.repeat, latency_iters=5
            )
            alpha_beta_dict = profiler.alpha_beta_dict
            logical_mesh_id = torch.tensor(profiler.search_best_logical_mesh())
    grid = DeviceMesh(torch.tensor(devices), logical_mesh_shape, logical_mesh_id, need_flatten=False)
    if alpha_beta_dict is not None:
        alpha, beta = extract_alpha_beta_for_device_mesh(alpha_beta_dict, grid.logical_mesh_id)
    elif measures:
        links = measure_links(grid.mesh, _QUICK)
        alpha, beta = [link.alpha for link in links.values()], [link.beta for link in links.values()]
    else:
        alpha, beta = [_KNOWN[0]] * len(grid.shape), [_KNOWN[1]] * len(grid.shape)
    found = DeviceMesh(grid.physical_mesh_id, None, grid.logical_mesh_id, alpha, beta)
    if measures and grid.mesh.device_type == "cpu":
        found.cpu = measure_cpu(grid.mesh)
    return found


_KNOWN = (10e-6, 1 / 300e9)  # of a node with NVLink, where there is nothing to measure


def _can_measure() -> bool:
    return dist.is_initialized() and dist.get_backend() != "fake"


def _devices(world_size: int, physical_devices: Sequence[int] | None) -> list[int]:
    if physical_devices is not None:
        devices = [int(rank) for rank in physical_devices]
        if world_size not in (-1, len(devices)):
            raise ValueError(
                f"world_size={world_size}, but physical_devices names {len(devices)} ranks: {devices}"
            )
    elif world_size != -1:
        devices = list(range(world_size))
    elif dist.is_initialized():
        devices = list(range(dist.get_world_size()))
    else:
        raise RuntimeError(
            "initialize_device_mesh needs a job, whose devices it takes: call colossalai.launch first, or"
            " give world_size"
        )
    if dist.is_initialized() and len(devices) != dist.get_world_size():
        raise ValueError(
            f"the mesh has {len(devices)} devices, and the job has {dist.get_world_size()} ranks: a model is"
            " parallelized over all of them"
        )
    return devices


def extract_alpha_beta_for_device_mesh(
    alpha_beta_dict: AlphaBetaDict, logical_mesh: torch.Tensor | Sequence[int]
) -> tuple[list[float], list[float]]:
    """``mesh_alpha`` and ``mesh_beta`` of a grid: the slowest link along each of its axes.

    Args:
        alpha_beta_dict: latency and seconds per byte of each pair of ranks.
        logical_mesh: the global ranks as they lie on the grid; or its shape, which is filled row by row.
    """
    if isinstance(logical_mesh, torch.Tensor):
        return slowest_links(alpha_beta_dict, logical_mesh)
    ranks = sorted({rank for pair in alpha_beta_dict for rank in pair})
    return slowest_links(alpha_beta_dict, torch.tensor(ranks).reshape(tuple(logical_mesh)))


def device_of(model: torch.nn.Module) -> DevicePreset | None:
    """How fast the GPU is on which ``model`` runs; None where it is a CPU."""
    first: Any = next(model.parameters(), None)
    kind = "cpu" if first is None else first.device.type
    if kind == "cuda" or (kind == "meta" and torch.cuda.is_available()):
        name = torch.cuda.get_device_name()
        try:
            return device_preset(name)
        except ValueError:
            warnings.warn(
                f"the speed of {name!r} is not known: operations cost what they would on an A100, so a plan"
                " may weigh them wrongly against communication",
                stacklevel=2,
            )
            return DEVICES["a100"]
    return None
