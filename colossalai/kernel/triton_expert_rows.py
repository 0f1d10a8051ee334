"""The Triton kernels of ``expert_rows``."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # the most that a program computes at once


@triton.jit
def _add_rows(
    rows, row, weights, kept, out, width, K: tl.constexpr, WEIGHTED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        choice = token * K + j
        here = inside
        if MASKED:
            here = inside & (tl.load(kept + choice) != 0)
        part = tl.load(rows + tl.load(row + choice) * width + column, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights + choice).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total, mask=inside)


def add_rows(rows: Tensor, row: Tensor, weights: Tensor | None, kept: Tensor | None) -> Tensor:
    rows, row = rows.contiguous(), row.contiguous()
    tokens, k = row.shape
    out = torch.empty(tokens, rows.size(1), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block, parts = _blocks(rows.size(1))
        with _on(rows):
            _add_rows[(tokens, parts)](
                rows,
                row,
                row if weights is None else weights.contiguous(),
                row if kept is None else _bytes(kept),
                out,
                rows.size(1),
                K=k,
                WEIGHTED=weights is not None,
                MASKED=kept is not None,
                BLOCK=block,
            )
    return out


@triton.jit
def _spread_rows(
    grad, rows, row, weights, kept, of_rows, of_weights, width, K: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(K):
        choice = token * K + j
        place = tl.load(row + choice) * width
        weight = tl.load(weights + choice).to(tl.float32)
        product = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            here = column < width
            if MASKED:
                here = here & (tl.load(kept + choice) != 0)
            g = tl.load(grad + token * width + column, mask=here, other=0.0).to(tl.float32)
            product += g * tl.load(rows + place + column, mask=here, other=0.0).to(tl.float32)
            tl.store(of_rows + place + column, g * weight, mask=here)
        tl.store(of_weights + choice, tl.sum(product, 0))


def spread_rows(
    grad: Tensor, rows: Tensor, row: Tensor, weights: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad, rows, row, weights = (t.contiguous() for t in (grad, rows, row, weights))
    tokens, k = row.shape
    every = kept is None and len(rows) == row.numel()
    of_rows = torch.empty_like(rows) if every else torch.zeros_like(rows)
    of_weights = torch.empty_like(weights)
    if of_weights.numel():
        block, _ = _blocks(rows.size(1))
        with _on(rows):
            _spread_rows[(tokens,)](
                grad,
                rows,
                row,
                weights,
                row if kept is None else _bytes(kept),
                of_rows,
                of_weights,
                rows.size(1),
                K=k,
                MASKED=kept is not None,
                BLOCK=block,
            )
    return of_rows, of_weights


@triton.jit
def _value(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        y = x
    return y


@triton.jit
def _slope(x, KIND: tl.constexpr):
    if KIND == "silu":
        s = tl.sigmoid(x)
        y = s * (1 + x * (1 - s))
    elif KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif KIND == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        y = tl.full(x.shape, 1.0, tl.float32)
    return y


@triton.jit
def _with_bias(wide, bias, number, column, stride, inside, BIAS: tl.constexpr):
    """A row of ``wide`` with the bias of its expert; ``wide`` points to the row, ``number`` to the expert."""
    x = tl.load(wide + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + tl.load(number) * stride + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _activate(
    wide, bias, expert, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stride = 2 * width if GATED else width
    x = _with_bias(wide + row * stride, bias, expert + row, column, stride, inside, BIAS)
    y = _value(x, KIND)
    if GATED:
        y *= _with_bias(wide + row * stride, bias, expert + row, width + column, stride, inside, BIAS)
    tl.store(out + row * width + column, y, mask=inside)


@triton.jit
def _activate_backward(
    grad, wide, bias, expert, out, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stride = 2 * width if GATED else width
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x = _with_bias(wide + row * stride, bias, expert + row, column, stride, inside, BIAS)
    of_x = g * _slope(x, KIND)
    if GATED:
        up = _with_bias(wide + row * stride, bias, expert + row, width + column, stride, inside, BIAS)
        tl.store(out + row * stride + width + column, g * _value(x, KIND), mask=inside)
        of_x *= up
    tl.store(out + row * stride + column, of_x, mask=inside)


def activate(wide: Tensor, bias: Tensor | None, expert: Tensor | None, kind: str, gated: bool) -> Tensor:
    wide = wide.contiguous()
    width = wide.size(1) // 2 if gated else wide.size(1)
    out = torch.empty(len(wide), width, dtype=wide.dtype, device=wide.device)
    _launch(_activate, (wide,), bias, expert, out, width, kind, gated)
    return out


def activate_backward(
    grad: Tensor, wide: Tensor, bias: Tensor | None, expert: Tensor | None, kind: str, gated: bool
) -> Tensor:
    grad, wide = grad.contiguous(), wide.contiguous()
    out = torch.empty_like(wide)
    _launch(_activate_backward, (grad, wide), bias, expert, out, grad.size(1), kind, gated)
    return out


def _launch(kernel, inputs, bias, expert, out, width, kind, gated) -> None:
    if not out.numel():
        return
    block, parts = _blocks(width)
    given = bias is not None
    with _on(out):
        kernel[(len(out), parts)](
            *inputs,
            bias.contiguous() if given else out,
            expert.contiguous() if given else out,
            out,
            width,
            KIND=kind,
            GATED=gated,
            BIAS=given,
            BLOCK=block,
        )


@triton.jit
def _sum_by_expert(rows, ends, out, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(ends + expert).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < end)[:, None] & inside[None, :]
        total += tl.load(rows + row[:, None] * width + column[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(out + expert * width + column, tl.sum(total, 0), mask=inside)


def sum_by_expert(rows: Tensor, ends: Tensor) -> Tensor:
    rows, ends = rows.contiguous(), ends.contiguous()
    out = torch.empty(len(ends), rows.size(1), dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(64, triton.next_power_of_2(rows.size(1)))
        with _on(rows):
            _sum_by_expert[(len(ends), triton.cdiv(rows.size(1), block))](
                rows, ends, out, rows.size(1), ROWS=32, BLOCK=block
            )
    return out


def _blocks(width: int) -> tuple[int, int]:
    """How many columns a program computes at once, and how many programs a row needs."""
    block = min(COLUMNS, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


def _on(tensor: Tensor) -> torch.cuda.device:
    return torch.cuda.device(tensor.device)
