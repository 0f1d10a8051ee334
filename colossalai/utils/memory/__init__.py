"""Memory, in bytes: what a device has and this process uses (``device``), the most that is in use between two
moments (``monitor``, ``live_bytes``), limits (``byte_count``), and large host buffers (``host_memory``).
"""

from colossalai.utils.memory.device import (
    available_host_memory,
    colo_device_memory_capacity,
    colo_device_memory_used,
    colo_get_cpu_memory_capacity,
    colo_set_cpu_memory_capacity,
    colo_set_process_memory_fraction,
    report_memory_usage,
)

__all__ = [
    "available_host_memory",
    "colo_device_memory_capacity",
    "colo_device_memory_used",
    "colo_get_cpu_memory_capacity",
    "colo_set_cpu_memory_capacity",
    "colo_set_process_memory_fraction",
    "report_memory_usage",
]
