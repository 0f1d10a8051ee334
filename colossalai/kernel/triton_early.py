"""Kernels that begin before the kernel in front of them has ended (programmatic dependent launch).

A kernel that calls ``gdc_launch_dependents`` lets the next one begin when all of its programs run; the next
one calls ``gdc_wait`` before it reads what others wrote.  Until then it may read what no kernel writes, as
weights.
"""

from __future__ import annotations

import os
from functools import cache

import torch

wanted = True
"""Whether kernels begin early where they can."""


def early(device: torch.device) -> bool:
    """Whether kernels on ``device`` begin early."""
    return wanted and _can(device)


@cache
def _can(device: torch.device) -> bool:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) >= (9, 0)
