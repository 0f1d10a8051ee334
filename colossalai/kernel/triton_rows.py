"""Products of one row with large weights on a GPU, at the speed at which the weights can be read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.triton_early import early

FEATURES, STEP, WARPS = 2, 1024, 4  # of a program; the fastest of those tried on an H200


@triton.jit
def _one_row(
    x, weight, bias, out, features, inner, row, BIAS: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Some features of one row: every thread keeps sums of its own, which meet at the end."""
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, STEP)
    at = weight + feature.to(tl.int64)[:, None] * row + place[None, :]
    exists = (feature < features)[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # the first weights come while the kernel before still computes x
    w = tl.load(at, mask=exists & (place < inner)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + place, mask=place < inner, other=0.0)
    total = w.to(tl.float32) * v.to(tl.float32)[None, :]
    for start in range(STEP, inner, STEP):
        inside = start + place < inner
        w = tl.load(at + start, mask=exists & inside[None, :], other=0.0, eviction_policy="evict_first")
        v = tl.load(x + start + place, mask=inside, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)
    tl.store(out + feature, result, mask=feature < features)


def one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` of one row; no kernel that has not ended may be writing the weights."""
    features, inner = weight.shape
    out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    soon = early(x.device)
    with torch.cuda.device(x.device):
        _one_row[(triton.cdiv(features, FEATURES),)](
            x, weight, out if bias is None else bias, out, features, inner, weight.stride(0),
            BIAS=bias is not None, EARLY=soon, ROWS=FEATURES, STEP=STEP, num_warps=WARPS, launch_pdl=soon,
        )  # fmt: skip
    return out
