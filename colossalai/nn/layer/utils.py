"""Small helpers that models with these layers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.mesh import Layout, redistribute
from colossalai.nn.layer.base import mark
from colossalai.nn.modes import Current, at_rank, current
from colossalai.nn.sequence import SequenceParallel
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
        run = partial(self._forward, **kwargs)
        return checkpointed(run, self._offload, *args, use_reentrant=False)


def divide(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, which must be whole."""
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def _ntuple(n: int) -> Callable[[Any], tuple[Any, ...]]:
    """A function that makes a tuple of ``n`` equal items of one, and leaves a sequence of ``n`` as it is."""

    def parse(value: Any) -> tuple[Any, ...]:
        items = tuple(value) if isinstance(value, (tuple, list)) else (value,) * n
        if len(items) != n:
            raise ValueError(f"expected one value or {n}, got {value!r}")
        return items

    return parse


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


# Changes of place that a model asks for by name: the first token of a sequence, and back to the residual
# stream.
#
# ``at`` is where the model lives, ``current()`` when it was built; by default where the job is now.


def first_token(x: Tensor, at: Current | None = None, across: SequenceParallel | None = None) -> Tensor:
    """``x[:, 0]`` of (batch, sequence, features) in the residual stream, also where the sequence is cut:
    between two products, or ``across`` ranks from the model's first layer on.
    """
    if across is not None:
        # the others add nothing, but their backward pass must meet that of the first
        mine = not any(across.mesh.coord[axis] for axis in across.axes)
        return across.total(x[:, 0] * mine)
    tp, mesh = at or current()
    batch, sequence, feature = tp.hidden.dims
    if mesh is None or not sequence:
        return x[:, 0]
    # every rank gives its first token, all keep the first of these
    return redistribute(x[:, :1], tp.hidden, Layout((batch, (), feature)), mesh)[:, 0]


def to_hidden(x: Tensor, at: Current | None = None) -> Tensor:
    """From where an expanding Linear leaves ``x`` to the residual stream's own layout, without a contracting
    Linear.
    """
    tp, mesh = at or current()
    if mesh is None or tp.size == 1:
        return x
    return redistribute(x, at_rank(tp.inner, x.ndim), at_rank(tp.hidden, x.ndim), mesh)


def local_heads(num_heads: int, at: Current | None = None) -> int:
    """How many of an attention's heads this rank computes: heads are features, and are cut like those."""
    tp, mesh = at or current()
    if mesh is None or tp.size == 1:
        return num_heads
    axes = tp.inner.dims[-1]
    parts = mesh.group_size(*axes)
    if num_heads % parts:
        below = num_heads // parts * parts
        raise ValueError(
            f"num_heads={num_heads} is shared by {' x '.join(f'{a}={mesh.size[a]}' for a in axes)} and must"
            f" be a multiple of {parts}; the nearest valid numbers are"
            f" {f'{below} and {below + parts}' if below else parts}"
        )
    return num_heads // parts
