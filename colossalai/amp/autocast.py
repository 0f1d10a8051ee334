"""Models and criterions that compute under ``torch.autocast``; weights and gradients stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from colossalai.interface import ModelWrapper

Criterion = Callable[..., Any]


class AutocastModel(ModelWrapper):
    """A module that is called under autocast to ``dtype``."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._autocast = (device_type, dtype)  # one name, so that `model.dtype` stays the user's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._autocast):
            return self.module(*args, **kwargs)


def autocast_criterion(criterion: Criterion, device_type: str, dtype: torch.dtype) -> Criterion:
    """A criterion under the same autocast: torch's losses then take
    half-precision outputs and compute in fp32.
    """
    if isinstance(criterion, nn.Module):
        return AutocastModel(criterion, device_type, dtype)

    @wraps(criterion)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return criterion(*args, **kwargs)

    return call


def device_type_of(model: nn.Module) -> str:
    """Where ``model`` computes; one without any tensor computes where its inputs will most likely be."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
