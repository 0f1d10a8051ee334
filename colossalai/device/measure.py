"""Measures the latency and the bandwidth of the axes of a mesh, with the collectives that moves use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai.device.presets import COMPUTE_PART, DEVICES, MEMORY_PART, DevicePreset
from colossalai.mesh import AxisLink, Mesh, collectives
from colossalai.mesh.collectives import Kind, Transfer

KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_ITEM = 4  # bytes of an element of what is sent
_LEAST_BETA = 1e-15  # a petabyte per second: timers are not exact


@dataclass(frozen=True)
class Timing:
    """How often a collective is timed, and with how many bytes."""

    warmup: int = 5
    repeat: int = 25
    latency_iters: int = 5
    sizes: Sequence[int] = field(default=(2**18, 2**20, 2**22))
    """Bytes of the whole tensor (see ``Transfer.bytes``)."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.repeat < 1 or self.latency_iters < 1:
            raise ValueError(
                f"a measurement needs warmup >= 0, repeat >= 1 and latency_iters >= 1, got {self.warmup},"
                f" {self.repeat} and {self.latency_iters}"
            )
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"a measurement needs sizes of at least 1 byte, got {list(self.sizes)}")


def measure_axis(mesh: Mesh, axis: str, kind: Kind, timing: Timing | None = None) -> tuple[float, float]:
    """``alpha`` and ``beta`` of a collective on ``axis``; every rank of the mesh calls it and gets the same.

    All groups of the axis work at the same time, as they do in training, and the slowest counts.
    """
    timing = timing or Timing()
    if mesh.size[axis] == 1:
        return 0.0, 0.0
    ranks = mesh.size[axis]
    short = _seconds(mesh, axis, kind, ranks, timing.warmup, timing.latency_iters)
    points = []
    for nbytes in timing.sizes:
        elements = max(nbytes // _ITEM // ranks, 1) * ranks
        sent = Transfer(kind, axis, ranks, elements * _ITEM).sent
        points.append((sent, _seconds(mesh, axis, kind, elements, timing.warmup, timing.repeat)))
    return fit_alpha_beta(short, points)


def measure_links(mesh: Mesh, timing: Timing | None = None) -> dict[str, AxisLink]:
    """The links of all axes of a mesh, for :func:`colossalai.mesh.routes.route`; every rank calls it."""
    found = {}
    for axis, ranks in mesh.size.items():
        alpha, beta = measure_axis(mesh, axis, "all_gather", timing)
        exchange = measure_axis(mesh, axis, "all_to_all", timing)[1]
        found[axis] = AxisLink(ranks, alpha, beta, exchange)
    return found


def measure_cpu(mesh: Mesh, seconds: float = 0.04) -> DevicePreset:
    """How fast a rank's CPU computes while all do, on average; every rank of the mesh calls it.

    Ranks of one host share its cores, so one of them by itself would be faster than it is in training.
    """
    a, b = torch.ones(256, 256), torch.ones(2**18)
    products = torch.empty_like(a)
    rates = [
        _rate(mesh, lambda: torch.mm(a, a, out=products), 2 * 256**3, seconds),
        # CPUs compute such functions more slowly than they read memory
        _rate(mesh, lambda: torch.nn.functional.gelu(b), 2 * b.nbytes, seconds),
    ]
    mean = torch.tensor(rates, dtype=torch.float64)
    for axis, ranks in mesh.size.items():
        mean = collectives.all_reduce(mean, mesh, axis) / ranks
    # a preset has the peak, of which kernels reach a part
    known = DEVICES["cpu"]
    single, memory = (
        float(rate) / part for rate, part in zip(mean, (COMPUTE_PART, MEMORY_PART), strict=True)
    )
    return replace(known, half=single, single=single, memory=memory)


def _rate(mesh: Mesh, work: Callable[[], object], amount: int, seconds: float) -> float:
    """How much is done in a second, while all ranks do the same."""
    work()
    for axis in mesh.axes:
        collectives.all_reduce(torch.zeros(1), mesh, axis)  # all begin together
    begin, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begin) < seconds:
        work()
        count += 1
    return max(count, 1) * amount / taken


def fit_alpha_beta(latency: float, points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line through ``latency`` that fits (bytes sent, seconds) best, by least squares."""
    slope = sum(b * (t - latency) for b, t in points) / sum(b * b for b, _ in points)
    return latency, max(slope, _LEAST_BETA)


def _seconds(mesh: Mesh, axis: str, kind: Kind, elements: int, warmup: int, repeat: int) -> float:
    """The median time of one call, on the slowest rank of the mesh."""
    call = _collective(mesh, axis, kind, elements)
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeat):
        _synchronize(mesh)
        begin = time.perf_counter()
        call()
        _synchronize(mesh)
        times.append(time.perf_counter() - begin)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=mesh.device_type)
    for each in mesh.axes:
        slowest = collectives.all_reduce(slowest, mesh, each, dist.ReduceOp.MAX)
    return slowest.item()


def _collective(mesh: Mesh, axis: str, kind: Kind, elements: int) -> Callable[[], Tensor]:
    ranks = mesh.size[axis]
    local = elements // ranks if kind == "all_gather" else elements
    x = torch.zeros((local, 1), dtype=torch.float32, device=mesh.device_type)
    if kind == "all_gather":
        return lambda: collectives.all_gather(x, mesh, axis, 0)
    if kind == "reduce_scatter":
        return lambda: collectives.reduce_scatter(x, mesh, axis, 0)
    if kind == "all_to_all":
        return lambda: collectives.all_to_all(x, mesh, axis, 1, 0)
    return lambda: collectives.all_reduce(x, mesh, axis)


def _synchronize(mesh: Mesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
