"""Products of one row with large weights on a GPU, at the speed at which the weights can be read."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from colossalai.kernel.triton_early import early

FEATURES, STEP, WARPS = 2, 1024, 4  # of a program; the fastest of those tried on an H200


@triton.jit
def _one_row(
    x, w0, w1, w2, b0, b1, b2, out, n0, n1, n2, inner, row, BIAS: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some features of one row, by one of three weights: every thread keeps sums of its own, which meet at
    the end.
    """
    program = tl.program_id(0)
    p0, p1 = tl.cdiv(n0, ROWS), tl.cdiv(n1, ROWS)
    weight, bias, features, first, begin = w0, b0, n0, program, 0
    if program >= p0 + p1:
        weight, bias, features, first, begin = w2, b2, n2, program - p0 - p1, n0 + n1
    elif program >= p0:
        weight, bias, features, first, begin = w1, b1, n1, program - p0, n0
    feature = first * ROWS + tl.arange(0, ROWS)
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
    tl.store(out + begin + feature, result, mask=feature < features)


def one_row(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """``x @ weight.T + bias`` of one row for up to three weights of one width, in one kernel; all have a bias
    or none has.

    No kernel that has not ended may be writing the weights.
    """
    features = [w.size(0) for w in weights]
    inner = x.size(1)
    out = torch.empty(1, sum(features), dtype=x.dtype, device=x.device)
    soon = early(x.device)
    none = [0] * (3 - len(weights))
    tables = [*weights, *(weights[0] for _ in none)]
    added = [out if b is None else b for b in (*biases, *(biases[0] for _ in none))]
    with torch.cuda.device(x.device):
        _one_row[(sum(triton.cdiv(n, FEATURES) for n in features),)](
            x, *tables, *added, out, *features, *none, inner, weights[0].stride(0),
            BIAS=biases[0] is not None, EARLY=soon, ROWS=FEATURES, STEP=STEP, num_warps=WARPS,
            launch_pdl=soon,
        )  # fmt: skip
    return list(out.split(features, 1))
