"""The device of this process: its CUDA device when there is one, the CPU otherwise."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")


def get_current_device() -> torch.device:
    """The device that new tensors of this process belong on."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def cuda_in_use() -> bool:
    """Whether this process has work on CUDA; asking does not start CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def synchronize() -> None:
    """Wait until the device has done all work given to it; nothing to wait for on the CPU."""
    if cuda_in_use():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give memory that torch holds but does not use back to the CUDA device."""
    if cuda_in_use():
        torch.cuda.empty_cache()


def set_to_cuda(models: T) -> T:
    """Move a module, or each module of a list, tuple or dict, to the current device and return it.

    Modules move in place.  Without CUDA the current device is the CPU.
    """
    if isinstance(models, nn.Module):
        return models.to(get_current_device())
    if isinstance(models, (list, tuple, dict)):
        for model in models.values() if isinstance(models, dict) else models:
            set_to_cuda(model)
        return models
    raise TypeError(f"set_to_cuda moves modules (or a list or dict of them), got {type(models).__name__}")
