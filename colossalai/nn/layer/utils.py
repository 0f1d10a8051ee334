"""Small helpers that models with these layers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.nn.layer.base import mark
from colossalai.nn.modes import current
from colossalai.utils.activation_checkpoint import checkpoint as checkpointed

ACT2FN: dict[str, Callable[..., Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swish": F.silu}


class CheckpointModule(nn.Module):
    """A module that keeps only its inputs for the backward pass; a subclass writes ``_forward`` instead of
    ``forward``.
    """

    def __init__(self, checkpoint: bool = True, offload: bool = False) -> None:
        super().__init__()
        self.checkpoint, self._offload = checkpoint, offload

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} must define _forward(), which CheckpointModule calls")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.checkpoint and self.training):
            return self._forward(*args, **kwargs)

        def run(*given: Any) -> Any:
            return self._forward(*given, **kwargs)

        return checkpointed(run, self._offload, *args, use_reentrant=False)


def divide(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, which must be whole."""
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def to_2tuple(value: int | tuple[int, int]) -> tuple[int, int]:
    """A number for both dims of an image, or a pair."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def get_tensor_parallel_mode() -> str | None:
    """The tensor mode that the job was launched with."""
    return current().tp.mode


def set_tensor_parallel_attribute_by_size(param: nn.Parameter, size: int) -> None:
    """Note on ``param`` that it is a piece of a parameter of ``size`` elements."""
    mark(param, divide(size, math.prod(param.shape)))


def set_tensor_parallel_attribute_by_partition(param: nn.Parameter, num_partitions: int) -> None:
    """Note on ``param`` that it is one of ``num_partitions`` pieces."""
    mark(param, num_partitions)
