"""LayerNorm and RMSNorm of features that may be cut.

The statistics of a row need all of its features, so they are one small exchange: each rank gives the mean and
the sum of squared deviations (M2) of its own features, and the pieces merge exactly,

    mean = sum_i n_i mean_i / n,    M2 = sum_i M2_i + n_i (mean_i - mean)^2,

which does not lose digits as E[x^2] - mean^2 does.  The backward pass needs the sums of g and g x_hat over
the features, one all-reduce for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossalai.nn.init as init
from colossalai._numeric import autocast_dtype
from colossalai.mesh import Axes, Mesh, collectives, use
from colossalai.mesh.first_order import check_first_order
from colossalai.nn.layer.base import ParallelLayer
from colossalai.nn.modes import TensorParallel


class _Norm(ParallelLayer):
    """The base of both norms: a weight along the features of the stream."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        dtype: torch.dtype | None,
        tp: TensorParallel | None,
        mesh: Mesh | None,
    ) -> None:
        super().__init__(tp, mesh)
        self._require_hidden()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(sizes) != 1:
            raise ValueError(
                f"{type(self).__name__} normalizes the last dim, its features; got normalized_shape={sizes}"
            )
        self.normalized_shape, self.eps = sizes, eps
        self.axes: Axes = self.tp.hidden.dims[-1]
        self._check_size("normalized_shape", sizes[0], (self.axes,))
        self.weight = self._parameter(sizes, self.tp.feature, init.ones_(), dtype=dtype)

    def _used(self, param: Tensor) -> Tensor:
        return use(param, self.tp.hidden.rows, self.mesh)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm`` over the features."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, dtype, tp, mesh)
        self.bias = None
        if bias:
            self.bias = self._parameter(self.normalized_shape, self.tp.feature, init.zeros_(), dtype=dtype)

    @classmethod
    def from_native(cls, module: nn.LayerNorm, *, tp: TensorParallel, mesh: Mesh | None) -> LayerNorm:
        """This rank's piece of an ``nn.LayerNorm`` with a weight."""
        if not module.elementwise_affine:
            raise ValueError(
                "LayerNorm.from_native needs a LayerNorm with a weight (elementwise_affine=True)"
            )
        with torch.device("meta"):
            layer = LayerNorm(module.normalized_shape, module.eps, module.bias is not None, tp=tp, mesh=mesh)
        layer._adopt("weight", module.weight)
        layer._adopt("bias", module.bias)
        return layer.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        if self.plain:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        weight = self._used(self.weight)
        bias = None if self.bias is None else self._used(self.bias)
        if not self.axes:
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        x_hat = _CutNorm.apply(
            _fp32_if_autocast(x), self.axes, self.mesh, self.normalized_shape[0], self.eps, True
        )
        return x_hat * weight if bias is None else torch.addcmul(bias, x_hat, weight)


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm`` over the features."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        dtype: torch.dtype | None = None,
        *,
        tp: TensorParallel | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, dtype, tp, mesh)

    @classmethod
    def from_native(cls, module: nn.Module, *, tp: TensorParallel, mesh: Mesh | None) -> RMSNorm:
        """This rank's piece of an RMS norm: torch's, or one of Hugging Face's, which call their eps
        variance_epsilon.
        """
        weight = module.weight
        assert isinstance(weight, Tensor)
        eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
        with torch.device("meta"):
            layer = RMSNorm(tuple(weight.shape), eps, tp=tp, mesh=mesh)
        layer._adopt("weight", weight)
        return layer.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        weight = self._used(self.weight)
        if not self.axes:
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        x = _fp32_if_autocast(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _CutNorm.apply(x, self.axes, self.mesh, self.normalized_shape[0], eps, False) * weight


def _fp32_if_autocast(x: Tensor) -> Tensor:
    return x if autocast_dtype(x.device) is None else x.float()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _CutNorm(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps)``, or without the mean, where ``axes`` cut the features; statistics in
    fp32, or fp64 of such features.

    By hand because it halves the exchanges of the derived rule; a test holds it against that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, mesh: Mesh, size: int, eps: float, centred: bool) -> Tensor:
        wide = _wide(x)
        if centred:
            mean, squares = _merged(wide, axes, mesh)
            wide = wide - mean
        else:
            squares = _sum(wide.square().sum(-1, keepdim=True), axes, mesh)
        scale = torch.rsqrt(squares / size + eps)
        x_hat = (wide * scale).to(x.dtype)
        ctx.save_for_backward(x_hat, scale)
        ctx.how = axes, mesh, size, centred
        return x_hat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        check_first_order("a norm of features")
        (x_hat, scale), (axes, mesh, size, centred) = ctx.saved_tensors, ctx.how
        wide, hat = _wide(grad), _wide(x_hat)
        along = (wide * hat).sum(-1, keepdim=True)
        if centred:
            sums = _sum(torch.cat([along, wide.sum(-1, keepdim=True)], -1), axes, mesh) / size
            along, mean = sums[..., :1], sums[..., 1:]
            return (scale * (wide - mean - hat * along)).to(grad.dtype), None, None, None, None, None
        along = _sum(along, axes, mesh) / size
        return (scale * (wide - hat * along)).to(grad.dtype), None, None, None, None, None


def _sum(x: Tensor, axes: Axes, mesh: Mesh) -> Tensor:
    for axis in axes:
        x = collectives.all_reduce(x, mesh, axis)
    return x


def _merged(x: Tensor, axes: Axes, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of whole rows; every rank holds equally many features."""
    mean, count = x.mean(-1, keepdim=True), x.size(-1)
    squares = (x - mean).square().sum(-1, keepdim=True)
    for axis in axes:
        both = collectives.all_gather(torch.stack([mean, squares]), mesh, axis, -1)  # (2, ..., ranks)
        mean = both[0].mean(-1, keepdim=True)
        squares = both[1].sum(-1, keepdim=True) + count * (both[0] - mean).square().sum(-1, keepdim=True)
        count *= mesh.size[axis]
    return mean, squares
