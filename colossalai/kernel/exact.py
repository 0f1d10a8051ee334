"""Operations whose results for a row do not depend on the other rows, bit for bit.

Products, sums along rows and attention add in one order, whatever the shape of the rest: kernels of Triton on
a GPU, of C on the host, and without a compiler products row by row.  ``exact_mode`` puts them in the place
of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel.native import exact as native
from colossalai.kernel.probe import triton_works

BLOCK = 1 << 14  # numbers of which torch computes functions on one thread
UNIT = 64  # numbers that fill its vectors
HALVES = (torch.bfloat16, torch.float16)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``bias + a @ b`` of batches of matrices, summed in float32 and rounded once."""
    if a.is_cuda:
        _require_triton(a)
        from colossalai.kernel import triton_exact

        return triton_exact.product(a, b, bias)
    if a.dtype in HALVES:
        return product(a.float(), b.float(), None if bias is None else bias.float()).to(a.dtype)
    if a.dtype == torch.float32 and native.works():
        return native.product(a, b, bias)
    found = _row_by_row(a, b)
    return found if bias is None else found + bias


def _row_by_row(a: Tensor, b: Tensor) -> Tensor:
    """Products of one shape each, so that torch computes all alike."""
    rows = [
        torch.stack([torch.mv(matrix, row.clone()) for row in part])
        if len(part)
        else part.new_empty(0, matrix.size(0))
        for part, matrix in zip(a, b.mT.contiguous(), strict=True)
    ]
    return torch.stack(rows) if rows else a.new_empty(0, a.size(1), b.size(2))


def row_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the last dim."""
    if x.is_cuda:
        _require_triton(x)
        from colossalai.kernel import triton_exact

        return triton_exact.over_rows(x, "sum", dtype)
    wide = x.float() if x.dtype in HALVES else x
    rows = wide.reshape(1, -1, x.size(-1))
    return product(rows, rows.new_ones(1, x.size(-1), 1)).view(x.shape[:-1]).to(dtype or x.dtype)


def softmax(x: Tensor, dtype: torch.dtype | None = None, *, log: bool = False) -> Tensor:
    """The softmax over the last dim, or its logarithm; ``dtype`` is that of the result."""
    dtype = dtype or x.dtype
    if x.is_cuda:
        _require_triton(x)
        from colossalai.kernel import triton_exact

        return triton_exact.over_rows(x, "log_softmax" if log else "softmax", dtype)
    wide = x.float() if x.dtype in HALVES else x
    wide = wide - wide.amax(-1, keepdim=True)
    shares = pointwise(torch.exp, wide)
    total = row_sum(shares)[..., None]
    return (wide - pointwise(torch.log, total) if log else shares / total).to(dtype)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, width: int, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` normalized over its last ``width`` numbers, their mean (0 if not ``centered``) and one over the
    root of their mean square.
    """
    if x.is_cuda:
        _require_triton(x)
        from colossalai.kernel import triton_exact

        return triton_exact.normalize(x, weight, bias, eps, centered, width)
    rows = (x.float() if x.dtype in HALVES else x).reshape(-1, width)
    mean = row_sum(rows)[:, None] / width if centered else rows.new_zeros(len(rows), 1)
    rows = rows - mean
    root = (row_sum(rows * rows)[:, None] / width + eps).sqrt().reciprocal()
    rows = rows * root
    if weight is not None:
        rows = rows * weight.reshape(-1)
    if bias is not None:
        rows = rows + bias.reshape(-1)
    return rows.view(x.shape).to(x.dtype), mean, root


def pointwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
    """A function of every number of ``x``.

    On the host torch computes whole vectors of numbers in another way than the last few of its part of the
    work; here there are no last few.
    """
    if x.is_cuda or not x.is_floating_point():
        return function(x, *args, **options)
    flat = x.contiguous().view(-1)
    out: Tensor | None = None
    for first in range(0, flat.numel(), BLOCK):
        part = flat[first : first + BLOCK]
        count = len(part)
        if count % UNIT:
            part = torch.cat([part, part.new_ones(UNIT - count % UNIT)])
        part = function(part, *args, **options)[:count]
        out = flat.new_empty(flat.shape, dtype=part.dtype) if out is None else out
        out[first : first + count] = part
    return function(x, *args, **options) if out is None else out.view(x.shape)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attention as ``scaled_dot_product_attention`` has it, with each head of keys for a number of heads.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads of keys, keys, width).
        mask: what expands to (batch, heads, queries, keys): booleans, or numbers that are added to scores.
    """
    batch, heads, queries, _ = query.shape
    keys = key.size(2)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
        mask = mask.float().expand(batch, heads, queries, keys)
    packed = query.transpose(1, 2).reshape(batch * queries, heads, query.size(3))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * queries
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=query.device)
    own = [t.transpose(1, 2) for t in (key, value)]
    order = 2 if causal else 0
    if query.is_cuda:
        _require_triton(query)
        from colossalai.kernel import triton_paged_attention

        table = torch.arange(batch, dtype=torch.int32, device=query.device)[:, None]
        keys_own, values_own = (t.to(query.dtype).contiguous() for t in own)
        out = triton_paged_attention.paged_attention(
            packed, keys_own, values_own, table, starts, lengths, queries, scale, None, None, True,
            mask=mask, order=order,
        )  # fmt: skip
    else:
        out = _on_host(packed, own, starts, lengths, scale=scale, causal=order, mask=mask)
    return out.view(batch, queries, heads, -1).transpose(1, 2)


def attention_to_pages(
    query: Tensor, pages: Sequence[Tensor], table: Tensor, starts: Tensor, lengths: Tensor, **options: Any
) -> Tensor:
    """``paged_attention`` on the host."""
    return _on_host(query, pages, starts, lengths, table=table, **options)


def _on_host(query: Tensor, keys_values: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
    if not native.works():
        raise RuntimeError("exact attention on the host needs a C compiler: install gcc or clang, or set CC")
    if query.dtype not in (torch.float32, *HALVES):
        raise TypeError(f"exact attention computes in float32 or less, not in {query.dtype}")
    out, _ = native.attention(query.float(), *(t.float() for t in keys_values), *args, **options)
    return out.to(query.dtype)


def _require_triton(x: Tensor) -> None:
    if x.dtype not in (torch.float32, *HALVES):
        raise TypeError(f"exact results on a GPU are of float32, bfloat16 or float16, not of {x.dtype}")
    if not triton_works():
        raise RuntimeError("exact results on a GPU need Triton, which does not work here")
