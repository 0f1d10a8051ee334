"""Products and sums of rows on a GPU whose results do not depend on the other rows, bit for bit.

A product is summed along its inner dim in chunks of ``CHUNK``, each by one instruction in one order, and the
chunks one after the other.  So one program may sum all chunks of a tile, which suits many rows, or one
program each, which suits few rows and much to read: the bits are the same.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.triton_early import early

CHUNK = 1024  # of the inner dim
STEP = 64  # of it at a time
WIDEST = 1 << 15  # row of a norm
FEW = 128  # rows, up to which chunks are summed by programs of their own


@triton.jit(do_not_specialize=["rows", "chunks"])
def _product(
    a, b, bias, out, rows, columns, inner, ab, ar, ai, bb, bi, bc, sb, sr, sc, ob, chunks,
    BIAS: tl.constexpr, ALONE: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A tile of ``a @ b``, or its sum over one chunk if chunks are summed ``ALONE``."""
    tiles = tl.cdiv(rows, ROWS)
    # tiles of rows that share columns of b run one after the other
    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tiles) * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(2).to(tl.int64)
    a += batch * ab
    b += batch * bb
    a_rows = a + row.to(tl.int64)[:, None] * ar
    b_columns = b + column.to(tl.int64)[None, :] * bc
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(1) if ALONE else 0
    last = first + 1 if ALONE else chunks
    for chunk in range(first, last):
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, inner), STEP):
            place = (start + tl.arange(0, STEP)).to(tl.int64)
            x = tl.load(
                a_rows + place[None, :] * ai,
                mask=(row < rows)[:, None] & (place < inner)[None, :],
                other=0.0,
            )
            y = tl.load(
                b_columns + place[:, None] * bi,
                mask=(place < inner)[:, None] & (column < columns)[None, :],
                other=0.0,
            )
            part = tl.dot(x, y, part, input_precision="ieee")
        total += part
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if ALONE:
        at = ((batch * chunks + first) * rows + row)[:, None] * columns + column[None, :]
        tl.store(out + at, total, mask=inside)
    else:
        if BIAS:
            at = batch * sb + row.to(tl.int64)[:, None] * sr + column.to(tl.int64)[None, :] * sc
            total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + batch * ob + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _add_chunks(
    parts, bias, out, rows, columns, sb, sr, sc, chunks, BIAS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sums of all chunks, in their order, of a part of a row."""
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for chunk in range(chunks):
        total += tl.load(
            parts + ((batch * chunks + chunk) * rows + row) * columns + column, mask=inside, other=0.0
        )
    if BIAS:
        total += tl.load(bias + batch * sb + row * sr + column * sc, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (batch * rows + row) * columns + column, total, mask=inside)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``bias + a @ b`` of batches of matrices; ``bias`` is of any shape that expands to the result's."""
    batch, rows, inner = a.shape
    columns = b.size(2)
    out = torch.empty(batch, rows, columns, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    full = a.dtype == torch.float32
    chunks = triton.cdiv(inner, CHUNK)
    given = out if bias is None else bias.expand(batch, rows, columns)
    strides = given.stride()
    alone = rows <= FEW and chunks > 1
    few = rows <= 64 or full
    tile = (64, 64, 32 if full else STEP, 4) if few else (128, 128, STEP, 8)
    target = torch.empty(batch, chunks, rows, columns, dtype=torch.float32, device=a.device) if alone else out
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]), chunks if alone else 1, batch)
    with torch.cuda.device(a.device):
        _product[grid](
            a, b, given, target, rows, columns, inner, *a.stride(), *b.stride(), *strides, rows * columns,
            chunks, BIAS=bias is not None, ALONE=alone, CHUNK=CHUNK, ROWS=tile[0], COLUMNS=tile[1],
            STEP=tile[2],
            num_warps=tile[3], num_stages=3,
        )  # fmt: skip
        if alone:
            width = 512
            _add_chunks[(rows, triton.cdiv(columns, width), batch)](
                target, given, out, rows, columns, *strides, chunks, BIAS=bias is not None, COLUMNS=width
            )
    return out


@triton.jit
def _over_rows(x, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a row, or the row's softmax or its logarithm; a row is read block after block."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    if KIND == "sum":
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            total += tl.load(x + row * width + start + place, mask=start + place < width, other=0.0).to(
                tl.float32
            )
        tl.store(out + row, tl.sum(total, 0))
    else:
        top = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, width, BLOCK):
            part = tl.load(x + row * width + start + place, mask=start + place < width, other=-float("inf"))
            top = tl.maximum(top, part.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        most = tl.max(top, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            part = tl.load(x + row * width + start + place, mask=start + place < width, other=-float("inf"))
            total += tl.exp(part.to(tl.float32) - most)
        whole = tl.sum(total, 0)
        for start in range(0, width, BLOCK):
            inside = start + place < width
            part = tl.load(x + row * width + start + place, mask=inside, other=0.0).to(tl.float32) - most
            part = tl.exp(part) / whole if KIND == "softmax" else part - tl.log(whole)
            tl.store(out + row * width + start + place, part, mask=inside)


@triton.jit
def _normalize(
    x, weight, bias, out, means, roots, width, eps, CENTERED: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    part = tl.load(x + row * width + place, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.sum(part, 0) / width
        tl.store(means + row, mean)
        part = tl.where(inside, part - mean, 0.0)
    root = 1.0 / tl.sqrt_rn(tl.sum(part * part, 0) / width + eps)
    tl.store(roots + row, root)
    part *= root
    if WEIGHT:
        part *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        part += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + place, part, mask=inside)


def over_rows(x: Tensor, kind: str, dtype: torch.dtype | None = None) -> Tensor:
    """``"sum"``, ``"softmax"`` or ``"log_softmax"`` over the last dim."""
    x = x.contiguous()
    width = x.size(-1)
    shape = x.shape[:-1] if kind == "sum" else x.shape
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if out.numel():
        with torch.cuda.device(x.device):
            _over_rows[(x.numel() // max(width, 1),)](x, out, width, KIND=kind, BLOCK=_block(width))
    return out


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` normalized over its last ``width`` numbers, the means and the reciprocal deviations."""
    x = x.contiguous()
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    rows = x.numel() // max(width, 1)
    out = torch.empty_like(x)
    means, roots = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if width > WIDEST:
        raise NotImplementedError(f"norms over {width} numbers on a GPU; there are norms over up to {WIDEST}")
    block = triton.next_power_of_2(max(width, 1))
    if rows and width:
        with torch.cuda.device(x.device):
            _normalize[(rows,)](
                x, out if weight is None else weight, out if bias is None else bias, out, means, roots, width,
                eps, CENTERED=centered, WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=block,
                EARLY=early(x.device), num_warps=min(16, max(1, block // 512)), launch_pdl=early(x.device),
            )  # fmt: skip
    return out, means, roots


def _block(width: int) -> int:
    return min(2048, triton.next_power_of_2(max(width, 1)))
