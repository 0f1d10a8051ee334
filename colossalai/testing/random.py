"""Random numbers that a test can repeat."""

from __future__ import annotations

import random

import numpy
import torch


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Seed Python, numpy and torch on all devices; ``cuda_deterministic`` also fixes cuDNN's algorithms."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if cuda_deterministic:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
