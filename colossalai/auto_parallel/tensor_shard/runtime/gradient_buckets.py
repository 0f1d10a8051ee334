"""Gradients of parameters that every rank has and uses for other elements: sums over ranks, in buckets, while
the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from colossalai.auto_parallel.tensor_shard.gradient_sums import (
    BUCKET_BYTES,
    padded_length,
    slowest_last,
    sum_axes,
)
from colossalai.mesh import Axes, Layout, Links, Mesh, redistribute
from colossalai.mesh.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)


@dataclass
class _Bucket:
    """Gradients of one dtype on one device that are summed over the same axes."""

    axes: Axes
    """In the order of the sums."""
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    size: int = 0
    pending: Pending | None = None


@dataclass
class _Pass:
    """One backward pass."""

    open: dict[Any, _Bucket] = field(default_factory=dict)
    sent: list[_Bucket] = field(default_factory=list)


class GradientBuckets:
    """Sums the gradients of one model.

    A gradient goes into a bucket instead of to its parameter.  A full bucket is summed while the backward
    pass goes on; at its end the parameters get their gradients, with all hooks, as from any backward pass.
    """

    def __init__(self, mesh: Mesh, links: Links, nbytes: int = BUCKET_BYTES) -> None:
        self.mesh, self.links, self.nbytes = mesh, links, nbytes
        self._passes: dict[int, _Pass] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientBuckets:
        return GradientBuckets(self.mesh, self.links, self.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientBuckets, (self.mesh, dict(self.links), self.nbytes)

    def can_wait(self, rest: Layout, used: Layout) -> bool:
        """Whether the gradient of a parameter that rests and is used like that is a plain sum over axes."""
        return _axes(rest, used) is not None

    def use(self, param: Tensor, rest: Layout, used: Layout) -> Tensor:
        """``param`` as it is used; its gradient is summed later."""
        if not (torch.is_grad_enabled() and param.requires_grad):
            return param
        if not param.is_leaf:
            return redistribute(param, rest, used, self.mesh, links=self.links)
        if torch._C._current_graph_task_id() == -1:
            self._passes.clear()  # of a backward pass that raised an error
        found = _axes(rest, used)
        assert found is not None
        axes = slowest_last((axis for axis in found if self.mesh.size[axis] > 1), self.links)
        if not axes:
            return param
        anchor = torch.empty(0, requires_grad=True)
        used_param: Tensor = _SumLater.apply(anchor, param.detach(), partial(self.add, param, axes=axes))
        return used_param

    def add(self, param: Tensor, grad: Tensor, axes: Axes) -> None:
        """Take a gradient of this rank's."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        now = self._passes[task]
        key = axes, grad.dtype, grad.device
        bucket = now.open.setdefault(key, _Bucket(axes))
        bucket.params.append(param)
        bucket.grads.append(grad)
        bucket.size += grad.numel() * grad.element_size()
        if bucket.size >= self.nbytes:
            self._send(now.open.pop(key), now)

    def _send(self, bucket: _Bucket, now: _Pass) -> None:
        first, *others = bucket.axes
        flat = torch.cat([part for grad in bucket.grads for part in self._padded(grad, bucket.axes)])
        if others:
            bucket.pending = start_reduce_scatter(flat, self.mesh, first, 0)
        else:
            bucket.pending = start_all_reduce(flat, self.mesh, first)
        now.sent.append(bucket)

    def _padded(self, grad: Tensor, axes: Axes) -> list[Tensor]:
        flat = grad.reshape(-1)
        missing = padded_length(flat.numel(), axes, self.links) - flat.numel()
        return [flat, flat.new_zeros(missing)] if missing else [flat]

    def _summed(self, bucket: _Bucket) -> Tensor:
        """All of a bucket: pieces are summed over the last axis, the slowest, and gathered."""
        assert bucket.pending is not None
        flat = bucket.pending()
        *scattered, last = bucket.axes
        for axis in scattered[1:]:
            flat = reduce_scatter(flat, self.mesh, axis, 0)
        if scattered:
            flat = all_reduce(flat, self.mesh, last)
        for axis in reversed(scattered):
            flat = all_gather(flat, self.mesh, axis, 0)
        return flat

    def _end(self, task: int) -> None:
        """A backward pass has ended."""
        now = self._passes.pop(task)
        for bucket in now.open.values():
            self._send(bucket, now)
        params: list[Tensor] = []
        grads: list[Tensor] = []
        for bucket in now.sent:
            lengths = [padded_length(grad.numel(), bucket.axes, self.links) for grad in bucket.grads]
            params += bucket.params
            for part, grad in zip(self._summed(bucket).split(lengths), bucket.grads, strict=True):
                grads.append(part[: grad.numel()].view(grad.shape))
        torch.autograd.backward(params, grads)


@lru_cache(maxsize=4096)
def _axes(rest: Layout, used: Layout) -> Axes | None:
    return sum_axes(rest, used)


class _SumLater(torch.autograd.Function):
    """A parameter, whose gradient goes to a bucket.

    ``anchor`` needs a gradient in the place of the parameter, which gets its own at the end.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, give: Callable[[Tensor], None]) -> Tensor:
        ctx.give = give
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a model that autoparallelize has changed cannot give gradients of gradients"
                " (create_graph=True) of parameters whose gradients are sums over ranks"
            )
        ctx.give(grad)
        return None, None, None
