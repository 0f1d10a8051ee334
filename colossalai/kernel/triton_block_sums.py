"""The Triton kernel of ``block_sums``."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.block_sums import AT_ONCE, Block

ROWS = 16


@triton.jit
def _lse_of(lse, start, rows, row, batch, head, strides):
    """The log-sum-exps of a block for rows of the result; minus infinity where it has none."""
    inside = (row >= start) & (row < start + rows)
    place = batch * strides[0] + head * strides[1] + (row - start) * strides[2]
    return tl.load(lse + place, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def _share(sums, total):
    """The share of the exponentials behind ``sums`` in all; nothing of nothing is 0."""
    return tl.where(total == -float("inf"), 0.0, tl.exp(sums - total))[:, None]


@triton.jit
def _values_of(values, start, rows, row, column, width, batch, head, strides):
    inside = ((row >= start) & (row < start + rows))[:, None] & (column < width)[None, :]
    place = batch * strides[0] + head * strides[1] + (row - start)[:, None] * strides[2] + column[None, :]
    return tl.load(values + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_blocks(
    v0, s0, start0, rows0, vb0, vh0, vl0, sb0, sh0, sl0,
    v1, s1, start1, rows1, vb1, vh1, vl1, sb1, sh1, sl1,
    v2, s2, start2, rows2, vb2, vh2, vl2, sb2, sh2, sl2,
    v3, s3, start3, rows3, vb3, vh3, vl3, sb3, sh3, sl3,
    old, qb, qh, ql, out, ob, oh, ol, lse, heads, length, width,
    NUMBER: tl.constexpr, WEIGHTED: tl.constexpr, OLD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    inside = (row < length)[:, None] & (column < width)[None, :]
    w0, w1, w2, w3, w4 = 1.0, 1.0, 1.0, 1.0, 1.0
    if WEIGHTED:
        at = lse + tl.program_id(1).to(tl.int64) * length + row
        t4 = tl.load(at, mask=row < length, other=-float("inf"))
        t0 = _lse_of(s0, start0, rows0, row, batch, head, (sb0, sh0, sl0))
        top = tl.maximum(t4, t0)
        if NUMBER > 1:
            t1 = _lse_of(s1, start1, rows1, row, batch, head, (sb1, sh1, sl1))
            top = tl.maximum(top, t1)
        if NUMBER > 2:
            t2 = _lse_of(s2, start2, rows2, row, batch, head, (sb2, sh2, sl2))
            top = tl.maximum(top, t2)
        if NUMBER > 3:
            t3 = _lse_of(s3, start3, rows3, row, batch, head, (sb3, sh3, sl3))
            top = tl.maximum(top, t3)
        top = tl.where(top == -float("inf"), 0.0, top)
        total = tl.exp(t4 - top) + tl.exp(t0 - top)
        if NUMBER > 1:
            total += tl.exp(t1 - top)
        if NUMBER > 2:
            total += tl.exp(t2 - top)
        if NUMBER > 3:
            total += tl.exp(t3 - top)
        total = top + tl.log(total)
        tl.store(at, total, mask=row < length)
        w4, w0 = _share(t4, total), _share(t0, total)
        if NUMBER > 1:
            w1 = _share(t1, total)
        if NUMBER > 2:
            w2 = _share(t2, total)
        if NUMBER > 3:
            w3 = _share(t3, total)
    result = w0 * _values_of(v0, start0, rows0, row, column, width, batch, head, (vb0, vh0, vl0))
    if NUMBER > 1:
        result += w1 * _values_of(v1, start1, rows1, row, column, width, batch, head, (vb1, vh1, vl1))
    if NUMBER > 2:
        result += w2 * _values_of(v2, start2, rows2, row, column, width, batch, head, (vb2, vh2, vl2))
    if NUMBER > 3:
        result += w3 * _values_of(v3, start3, rows3, row, column, width, batch, head, (vb3, vh3, vl3))
    if OLD:
        place = batch * qb + head * qh + row[:, None] * ql + column[None, :]
        result += w4 * tl.load(old + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + batch * ob + head * oh + row[:, None] * ol + column[None, :], result, mask=inside)


def add_blocks(blocks: Sequence[Block], old: Tensor | None, out: Tensor, lse: Tensor | None) -> Tensor:
    batch, heads, length, width = out.shape
    if not out.numel():
        return out
    if out.stride(3) != 1:
        return out.copy_(
            add_blocks(blocks, old, torch.empty(out.shape, dtype=out.dtype, device=out.device), lse)
        )
    arguments: list[Any] = []
    for block in [*blocks, *[blocks[0]] * (AT_ONCE - len(blocks))]:
        values = block.values if block.values.stride(3) == 1 else block.values.contiguous()
        sums = values if block.lse is None else block.lse
        arguments += [values, sums, block.start, values.size(2), *values.stride()[:3], *sums.stride()[:3]]
    before = out if old is None else old if old.stride(3) == 1 else old.contiguous()
    with torch.cuda.device(out.device):
        _add_blocks[(triton.cdiv(length, ROWS), batch * heads)](
            *arguments,
            *(before, *before.stride()[:3]),
            *(out, *out.stride()[:3]),
            out if lse is None else lse,
            heads,
            length,
            width,
            NUMBER=len(blocks),
            WEIGHTED=lse is not None,
            OLD=old is not None,
            ROWS=ROWS,
            COLUMNS=triton.next_power_of_2(width),
        )
    return out
