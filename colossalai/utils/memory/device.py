"""The memory of a device, and the part of it that this process uses, in bytes."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from colossalai.logging import DistributedLogger, get_dist_logger
from colossalai.utils.device import cuda_in_use, get_current_device

MB = 1024 * 1024

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_MEMINFO = Path("/proc/meminfo")

_cpu_capacity: int | None = None
_cuda_fraction = 1.0


def colo_get_cpu_memory_capacity() -> int:
    """What ``colo_set_cpu_memory_capacity`` set, otherwise the memory of this machine or container."""
    return _physical_memory() if _cpu_capacity is None else _cpu_capacity


def colo_set_cpu_memory_capacity(size: int | None) -> None:
    """Let the planners count on ``size`` bytes of host memory; ``None`` returns to the real amount."""
    global _cpu_capacity
    if size is not None and size <= 0:
        raise ValueError(f"the CPU memory capacity is a positive number of bytes, got {size}")
    _cpu_capacity = size


def colo_device_memory_capacity(device: torch.device | str) -> int:
    """The memory that this process may use on ``device``.

    On CUDA this heeds ``colo_set_process_memory_fraction``; host memory is shared by all processes of the
    node.
    """
    device = _device(device)
    if device.type == "cpu":
        return colo_get_cpu_memory_capacity()
    return int(torch.cuda.get_device_properties(device).total_memory * _cuda_fraction)


def colo_device_memory_used(device: torch.device | str) -> int:
    """The memory that this process uses: tensors on a CUDA device, everything resident on the CPU."""
    device = _device(device)
    if device.type == "cpu":
        return _resident_memory()
    return torch.cuda.memory_allocated(device)


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Limit this process to ``ratio`` of its CUDA device's memory; without CUDA this warns and does
    nothing.
    """
    global _cuda_fraction
    if not 0 < ratio <= 1:
        raise ValueError(f"the fraction of device memory must be above 0 and at most 1, got {ratio}")
    if not torch.cuda.is_available():
        get_dist_logger().warning_once(
            "colo_set_process_memory_fraction has no effect without CUDA", ranks=[0]
        )
        return
    torch.cuda.set_per_process_memory_fraction(ratio, get_current_device())
    _cuda_fraction = ratio


def report_memory_usage(
    message: str, logger: DistributedLogger | None = None, report_cpu: bool = False
) -> None:
    """Log what this process uses now and used at most since the last report, in MB.

    The CPU part appears with ``report_cpu``, and whenever there is nothing to say about CUDA.
    """
    parts = []
    if cuda_in_use():
        parts.append(
            f"GPU: allocated {torch.cuda.memory_allocated() / MB:.2f} MB, "
            f"max allocated {torch.cuda.max_memory_allocated() / MB:.2f} MB, "
            f"cached: {torch.cuda.memory_reserved() / MB:.2f} MB, "
            f"max cached: {torch.cuda.max_memory_reserved() / MB:.2f} MB"
        )
        torch.cuda.reset_peak_memory_stats()
    if report_cpu or not parts:
        parts.append(f"CPU: resident {_resident_memory() / MB:.2f} MB")
    (logger or get_dist_logger()).info(f"{message}: {', '.join(parts)}")


def _device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory is known for 'cpu' and 'cuda' devices, got {str(device)!r}")
    return device


def _physical_memory() -> int:
    """The machine's memory, or the limit of the container if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (limit := file.read_text().strip()).isdecimal():
            total = min(total, int(limit))
    return total


def available_host_memory() -> int:
    """The host memory that this machine, or container, can still give, in bytes."""
    total = colo_get_cpu_memory_capacity()
    if not _MEMINFO.is_file():
        return total - _resident_memory()
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    free = {words[0]: int(words[1]) * 1024 for words in lines}["MemAvailable:"]
    if (used := _container_memory()) is not None:
        free = min(free, total - used)
    return min(free, total)


def _container_memory() -> int | None:
    """What the container uses, without file pages that the system can take back; None without a container."""
    current, stat = (Path(_CGROUP_LIMITS[0]).with_name(name) for name in ("memory.current", "memory.stat"))
    if not current.is_file() or not stat.is_file():
        return None
    pages = dict(line.split() for line in stat.read_text().splitlines())
    return int(current.read_text()) - int(pages.get("inactive_file", 0))


def _resident_memory() -> int:
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # elsewhere only the peak is known
    return peak if sys.platform == "darwin" else peak * 1024
