"""Products of one row with large weights on a GPU, at the speed at which the weights can be read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEATURES, STEP, WARPS = 2, 1024, 4  # of a program; the fastest of those tried on an H200
PART = 128 * 128  # bytes that a program fetches ahead: one line by each thread


@triton.jit
def _one_row(
    x, weight, bias, out, following, features, inner, row, first, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some features of one row: every thread keeps sums of its own, which meet at the end."""
    program = tl.program_id(0)
    feature = program * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, STEP)
    at = weight + feature.to(tl.int64)[:, None] * row + place[None, :]
    exists = (feature < features)[:, None]
    total = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, inner, STEP):
        inside = start + place < inner
        w = tl.load(at + start, mask=exists & inside[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + start + place, mask=inside, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    if AHEAD and program >= first:  # the last programs, since what they have to read themselves is on its way
        line = (program - first).to(tl.int64) * 128 + tl.arange(0, 128)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 128; mov.u32 $0, 0;",
            "=r,l",
            [(following + line * 128)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)
    tl.store(out + feature, result, mask=feature < features)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None, following: int = 0, ahead: int = 0) -> Tensor:
    """``x @ weight.T + bias`` of one row.

    Args:
        following: the address of what the next product reads; so many bytes of it, ``ahead``, are brought
            into the cache of the GPU, which has little to do until then.
    """
    features, inner = weight.shape
    out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(features, FEATURES)
    parts = min(ahead // PART, programs)
    with torch.cuda.device(x.device):
        _one_row[(programs,)](
            x, weight, out if bias is None else bias, out, following, features, inner, weight.stride(0),
            programs - parts, BIAS=bias is not None, AHEAD=parts > 0, ROWS=FEATURES, STEP=STEP,
            num_warps=WARPS,
        )  # fmt: skip
    return out
