"""The kernels that attend one block of queries to one block of keys and also give the log-sum-exp.

torch's public ``scaled_dot_product_attention`` keeps the log-sum-exp of its scores for itself; the functions
below it hand it out, and their backward passes take any output and log-sum-exp, also those of all blocks
together.  They are private to torch, so this table is the only place that calls them.

Shapes are those of torch: q (batch, heads, queries, head dim), k and v (batch, key heads, keys, head dim),
``bias`` (batch, heads, queries, keys) is added to the scores; a log-sum-exp is (batch, heads, queries),
float32 or float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)

from colossalai._numeric import HALF_DTYPES, round_up

_aten = torch.ops.aten
_CPU_DTYPES = {torch.float32, torch.float64, *HALF_DTYPES}

Gradients = tuple[Tensor, Tensor, Tensor]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of a tensor of ``dtype`` are added up."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


@dataclass(frozen=True)
class Kernel:
    """One way to compute a block: q, k, v, bias, causal, scale -> output, log-sum-exp; its backward takes the
    gradient of the output first and the output and the log-sum-exp behind v.
    """

    name: str
    fits: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    grouped: bool
    """Whether k and v may have fewer heads than q."""


def _fits_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> bool:
    # on the meta device it gives the shapes
    return q.device.type in ("cpu", "meta") and q.dtype in _CPU_DTYPES and q.size(-1) == v.size(-1)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _on_cuda(
    can_use: Callable[[SDPAParams], bool], takes_bias: bool, grouped: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], bool]:
    def fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> bool:
        if q.device.type != "cuda" or (bias is not None and not takes_bias):
            return False
        return can_use(SDPAParams(q, k, v, bias, 0.0, causal, grouped))  # also what the user has disabled

    return fits


def _no_numbers(q: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """An argument for the random state of a dropout; there is none, so the kernels do not read it."""
    return torch.empty(shape, dtype=dtype, device=q.device)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    state = _no_numbers(q, torch.int64)
    lse = lse.contiguous().unsqueeze(-1)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse, state, state, bias, None, None, q.size(2), k.size(2), 0.0, causal),
        scale=scale,
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse[..., : q.size(2)]


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    state = _no_numbers(q, torch.uint64, 2)
    return _aten._scaled_dot_product_flash_attention_backward(
        *(grad, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, causal, state, state),
        scale=scale,
    )


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.size(2)]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients:
    state = _no_numbers(q, torch.int64)
    # in half precision the kernel reads the output as (batch, queries, heads, head dim), whatever its strides
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # the kernel reads whole groups of 32 rows
    lse = F.pad(lse, (0, round_up(q.size(2), 32) - q.size(2)), value=math.inf)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(grad, q, k, v, bias, out, lse, state, state, 0.0, [True, True, True, False], causal), scale=scale
    )
    return dq, dk, dv


KERNELS = (
    Kernel("cpu", _fits_cpu, _cpu_forward, _cpu_backward, grouped=False),
    Kernel(
        "cudnn", _on_cuda(can_use_cudnn_attention, False, True), _cudnn_forward, _cudnn_backward, grouped=True
    ),
    Kernel(
        "flash", _on_cuda(can_use_flash_attention, False, True), _flash_forward, _flash_backward, grouped=True
    ),
    Kernel(
        "efficient",
        _on_cuda(can_use_efficient_attention, True, False),
        _efficient_forward,
        _efficient_backward,
        grouped=False,
    ),
)
"""The fastest first; where none fits, :func:`plain_forward` computes."""


def find_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Kernel | None:
    """The fastest kernel for this block, if there is one."""
    for kernel in KERNELS:
        # repeated heads are only made for a kernel that fits; to ask it, any heads do
        keys, values = (x if kernel.grouped else x[:, :1].expand(-1, q.size(1), -1, -1) for x in (k, v))
        if kernel.fits(q, keys, values, bias, causal):
            return kernel
    return None


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """``x`` with as many heads as ``q``; each head serves the next ``q.size(1) / x.size(1)`` of its heads."""
    times = q.size(1) // x.size(1)
    return x if times == 1 else x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x`` from that of :func:`repeat_heads`."""
    if grad.size(1) == x.size(1):
        return grad
    return grad.unflatten(1, (x.size(1), -1)).sum(2, dtype=sum_dtype(x.dtype))


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by matrix products, with scores in memory; ``kept`` multiplies the probabilities (dropout)."""
    scores = _scores(q, k, bias, scale)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse.unsqueeze(-1)).exp_()
    return (p if kept is None else p.mul_(kept)) @ repeat_heads(v, q).to(p.dtype), lse


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
    kept: Tensor | None = None,
) -> Gradients:
    """The gradients of :func:`plain_forward`, for the output and the log-sum-exp of all blocks together."""
    p = _scores(q, k, bias, scale).sub_(lse.unsqueeze(-1)).exp_()
    grad, out = grad.to(p.dtype), out.to(p.dtype)
    of_p = grad @ repeat_heads(v, q).to(p.dtype).mT
    if kept is not None:
        of_p = of_p * kept
    of_scores = p * (of_p - (grad * out).sum(-1, keepdim=True)) * scale
    dv = (p if kept is None else p * kept).mT @ grad
    dk = of_scores.mT @ q.to(p.dtype)
    return of_scores @ repeat_heads(k, q).to(p.dtype), sum_heads(dk, k), sum_heads(dv, v)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    dtype = sum_dtype(q.dtype)
    scores = (q.to(dtype) * scale) @ repeat_heads(k, q).to(dtype).mT
    return scores if bias is None else scores.add_(bias)


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp by the fastest kernel; None where there is none."""
    kernel = find_kernel(q, k, v, bias, causal)
    if kernel is None:
        return None
    if not kernel.grouped:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    return kernel.forward(q, k, v, bias, causal, scale)


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> Gradients | None:
    """The gradients of q, k and v by the fastest kernel; None where there is none."""
    kernel = find_kernel(q, k, v, bias, causal)
    if kernel is None:
        return None
    keys, values = (k, v) if kernel.grouped else (repeat_heads(k, q), repeat_heads(v, q))
    dq, dk, dv = kernel.backward(grad, q, keys, values, out, lse, bias, causal, scale)
    return dq, sum_heads(dk, k), sum_heads(dv, v)
