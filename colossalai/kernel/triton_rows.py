"""Products of a few rows with large weights on a GPU, at the speed at which the weights can be read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _one_row(
    x, weight, bias, out, features, inner, row, BIAS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some features of one row: every thread keeps sums of its own, which meet at the end."""
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, STEP)
    at = weight + feature.to(tl.int64)[:, None] * row + place[None, :]
    exists = (feature < features)[:, None]
    total = tl.zeros((ROWS, STEP), tl.float32)
    for start in tl.range(0, inner, STEP, num_stages=STAGES):
        inside = start + place < inner
        w = tl.load(at + start, mask=exists & inside[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + start + place, mask=inside, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)
    tl.store(out + feature, result, mask=feature < features)


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: int = 4,
    step: int = 1024,
    stages: int = 1,
    warps: int = 4,
) -> Tensor:
    features, inner = weight.shape
    out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        _one_row[(triton.cdiv(features, rows),)](
            x, weight, out if bias is None else bias, out, features, inner, weight.stride(0),
            BIAS=bias is not None, ROWS=rows, STEP=step, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit
def _few_rows(
    x, weight, out, rows, features, inner, row, share, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some features of up to ``ROWS`` rows, summed over one share of the inner dim."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    number, place = tl.arange(0, ROWS), tl.arange(0, STEP)
    first = tl.program_id(1) * share
    at = weight + feature.to(tl.int64)[:, None] * row + place[None, :]
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for start in tl.range(first, tl.minimum(first + share, inner), STEP, num_stages=STAGES):
        inside = start + place < inner
        w = tl.load(at + start, mask=(feature < features)[:, None] & inside[None, :], other=0.0)
        v = tl.load(
            x + number[None, :] * inner + start + place[:, None],
            mask=(number < rows)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(w, v, total)
    at = (tl.program_id(1) * rows + number)[None, :] * features + feature[:, None]
    tl.store(out + at, total, mask=(number < rows)[None, :] & (feature < features)[:, None])


@triton.jit
def _add_shares(parts, bias, out, size, features, shares, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for share in range(shares):
        total += tl.load(parts + share * size + place, mask=place < size, other=0.0)
    if BIAS:
        total += tl.load(bias + place % features, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, total, mask=place < size)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, shares: int = 4, block: int = 64, step: int = 128,
    stages: int = 4, warps: int = 4,
) -> Tensor:  # fmt: skip
    rows, (features, inner) = x.size(0), weight.shape
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    parts = torch.empty(shares, rows, features, dtype=torch.float32, device=x.device)
    share = triton.cdiv(triton.cdiv(inner, shares), step) * step
    with torch.cuda.device(x.device):
        _few_rows[(triton.cdiv(features, block), shares)](
            x, weight, parts, rows, features, inner, weight.stride(0), share,
            ROWS=max(16, triton.next_power_of_2(rows)), FEATURES=block, STEP=step, STAGES=stages,
            num_warps=warps,
        )  # fmt: skip
        _add_shares[(triton.cdiv(rows * features, 1024),)](
            parts,
            out if bias is None else bias,
            out,
            rows * features,
            features,
            shares,
            BIAS=bias is not None,
            BLOCK=1024,
        )
    return out
