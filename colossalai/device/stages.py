"""``alpa_dp``: which layers form a pipeline stage, and which part of the cluster each stage gets."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Stage = tuple[tuple[int, int], int, int]
"""The first layer and the one behind the last, the number of the submesh, the number of the configuration."""


def get_submesh_choices(num_hosts: int, num_devices_per_host: int) -> list[tuple[int, int]]:
    """The parts (hosts, devices of each) of a cluster that a stage may get: a part of a host that divides it,
    or whole hosts.

    Such parts fill the cluster without a rest.
    """
    if num_hosts < 1 or num_devices_per_host < 1:
        raise ValueError(
            f"a cluster has at least 1 host with 1 device, got {num_hosts} with {num_devices_per_host} each"
        )
    parts = [(1, n) for n in range(1, num_devices_per_host) if num_devices_per_host % n == 0]
    return parts + [(hosts, num_devices_per_host) for hosts in range(1, num_hosts + 1)]


def alpa_dp(
    num_layers: int,
    num_devices: int,
    num_microbatches: int,
    submesh_choices: Sequence[tuple[int, int]],
    num_autosharding_configs: int,
    compute_cost: ArrayLike,
    gap: float = 1e-6,
) -> tuple[float, list[Stage]]:
    """The stages of the fastest pipeline that uses all devices, and the time of its step.

    A step takes the time of all stages for the first micro-batch, and the time of the slowest stage for each
    of the others.

    Args:
        num_layers: layers of the model.
        num_devices: devices of the cluster.
        num_microbatches: micro-batches of a step.
        submesh_choices: (hosts, devices of each) that a stage may get.
        num_autosharding_configs: ways of computing a stage on a submesh.
        compute_cost: ``[first layer, last layer, submesh, configuration]``, in seconds for a micro-batch;
            infinite where it is not possible.
        gap: limits of the slowest stage that are closer than this are tried once, so the time may be above
            the best by ``num_microbatches * gap``.
    """
    expected = (num_layers, num_layers, len(submesh_choices), num_autosharding_configs)
    cost = _checked(compute_cost, expected, num_microbatches)
    config, best_cost = cost.argmin(-1), cost.min(-1)
    sizes = [math.prod(choice) for choice in submesh_choices]
    limits = np.unique(best_cost[np.triu_indices(num_layers)])
    limits = limits[np.isfinite(limits)]

    def split(limit: float) -> tuple[float, list[tuple[tuple[int, int], int]]]:
        return _split(np.where(best_cost <= limit, best_cost, np.inf), sizes, num_devices)

    # the larger the limit, the more is possible
    first_possible = bisect_left(limits, True, key=lambda limit: math.isfinite(split(limit)[0]))
    if first_possible == len(limits):
        raise ValueError(
            f"no pipeline puts {num_layers} layers on all {num_devices} devices with the submeshes"
            f" {list(submesh_choices)}: too many costs are infinite, or no sizes add up to the devices"
        )
    best, stages, tried = math.inf, list[tuple[tuple[int, int], int]](), -math.inf
    for limit in limits[first_possible:].tolist():
        if limit * num_microbatches >= best:
            break
        if limit - tried >= gap:
            tried = limit
            total, found = split(limit)
            if total + (num_microbatches - 1) * limit < best:
                best, stages = total + (num_microbatches - 1) * limit, found
    slowest = max(best_cost[first, end - 1, mesh] for (first, end), mesh in stages)
    total = sum(best_cost[first, end - 1, mesh] for (first, end), mesh in stages)
    return float(total + (num_microbatches - 1) * slowest), [
        ((first, end), mesh, int(config[first, end - 1, mesh])) for (first, end), mesh in stages
    ]


def _checked(
    compute_cost: ArrayLike, expected: tuple[int, ...], num_microbatches: int
) -> NDArray[np.float64]:
    cost = np.asarray(compute_cost, dtype=np.float64)
    if cost.shape != expected:
        raise ValueError(
            f"compute_cost has the shape {cost.shape}; [first layer, last layer, submesh, configuration] is"
            f" {expected}"
        )
    if num_microbatches < 1 or np.isnan(cost).any():
        raise ValueError("alpa_dp needs at least 1 micro-batch, and costs that are numbers (or infinite)")
    return cost


def _split(
    cost: NDArray[np.float64], sizes: list[int], devices: int
) -> tuple[float, list[tuple[tuple[int, int], int]]]:
    """The stages with the smallest sum of costs ``[first, last, submesh]`` that use all devices."""
    layers = len(cost)
    # of the layers from here to the last, on so many devices
    total = np.full((layers + 1, devices + 1), np.inf)
    total[layers, 0] = 0.0
    choice = np.zeros((layers, devices + 1, 2), dtype=np.int64)
    for first in reversed(range(layers)):
        for mesh, size in enumerate(sizes):
            if size > devices:
                continue
            # rows: where the next stage begins; columns: devices of all stages from here on
            sums = cost[first, first:, mesh, None] + total[first + 1 :, : devices + 1 - size]
            end, least = sums.argmin(0), sums.min(0)
            better = least < total[first, size:]
            total[first, size:][better] = least[better]
            choice[first, size:, 0][better] = end[better] + first + 1
            choice[first, size:, 1][better] = mesh
    if not np.isfinite(total[0, devices]):
        return math.inf, []
    stages, first, left = [], 0, devices
    while first < layers:
        end, mesh = (int(n) for n in choice[first, left])
        stages.append(((first, end), mesh))
        first, left = end, left - sizes[mesh]
    return float(total[0, devices]), stages
