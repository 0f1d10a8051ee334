"""Batch norm of a batch that is cut over ranks, with the statistics of the whole batch, as on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colossalai.mesh import Axes, Mesh
from colossalai.mesh.collectives import all_gather, all_reduce


def batch_norm_of_whole(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    axes: Axes,
    mesh: Mesh,
) -> Tensor:
    """``batch_norm`` in training of this rank's part of a batch that ``axes`` cut evenly."""
    rows = x.numel() // x.size(1) * mesh.group_size(*axes)
    if rows == 1:
        raise ValueError(f"batch_norm needs more than 1 value per channel in training, got {tuple(x.shape)}")
    mean, var = _statistics(x, axes, mesh)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = var * (rows / (rows - 1))
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    y: Tensor = _Normalize.apply(x, weight, mean, torch.rsqrt(var + eps), rows, axes, mesh)
    return y if bias is None else y + bias.view(_channels(x)).to(y.dtype)


def _channels(x: Tensor) -> list[int]:
    return [1, -1, *((1,) * (x.ndim - 2))]


def _rest(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


@torch.no_grad()
def _statistics(x: Tensor, axes: Axes, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each channel over the whole batch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(dtype), _rest(x), correction=0)
    for axis in axes:
        # every rank has equally many rows: the variance of the whole is the mean of the variances, and the
        # variance of the means
        means, variances = all_gather(torch.stack([mean, var])[None], mesh, axis, 0).unbind(1)
        mean = means.mean(0)
        var = variances.mean(0) + (means - mean).square().mean(0)
    return mean, var


class _Normalize(torch.autograd.Function):
    """(x - mean) / deviation * weight, where mean and deviation are those of the pieces of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        rows: int,
        axes: Axes,
        mesh: Mesh,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.whole = rows, axes, mesh
        shape = _channels(x)
        factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
        return ((x.to(mean.dtype) - mean.view(shape)) * factor.view(shape)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        rows, axes, mesh = ctx.whole
        shape, rest = _channels(x), _rest(x)
        wide = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        of_grad, of_weight = wide.sum(rest), (wide * normal).sum(rest)
        sums = torch.stack([of_grad, of_weight])
        for axis in axes:
            sums = all_reduce(sums, mesh, axis)
        of_all, of_product = (sums / rows).unbind()
        factor = inverse if weight is None else inverse * weight.to(inverse.dtype)
        wide = (wide - of_all.view(shape) - normal * of_product.view(shape)) * factor.view(shape)
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        return wide.to(x.dtype), of_weight, None, None, None, None, None
