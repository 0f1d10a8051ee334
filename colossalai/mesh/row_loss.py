"""The cross entropy of each row of scores whose classes are whole, or cut over ranks.

With peak = max_j x_j over all classes, the loss of a row with class t is

    log sum_j exp(x_j - peak)  -  (1 - s) (x_t - peak)  -  s mean_j (x_j - peak),

where s smooths the labels.  The maximum is one exchange, the three sums are another.  Only the scores
themselves and one number per row are kept; the gradient, softmax minus target, is made in the backward pass,
a slab of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import colossalai.mesh.collectives as collectives
from colossalai.mesh.first_order import check_first_order
from colossalai.mesh.layout import local_range
from colossalai.mesh.mesh import Axes, Mesh

# elements that are held in fp32 at a time
_SLAB = 1 << 22


class Classes(NamedTuple):
    """The classes of a row: cut by ``axes`` of ``mesh``, or whole; ``number`` of them in all."""

    number: int
    axes: Axes = ()
    mesh: Mesh | None = None

    def range(self) -> tuple[int, int]:
        if self.mesh is None:
            return 0, self.number
        return local_range(self.number, self.axes, self.mesh, uneven=True)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Combine ``x`` over the ranks that hold the other classes of these rows."""
        if self.mesh is not None:
            for axis in self.axes:
                x = collectives.all_reduce(x, self.mesh, axis, op)
        return x


def row_losses(logits: Tensor, target: Tensor, classes: Classes, smoothing: float = 0.0) -> Tensor:
    """Losses, at least in fp32, of (rows, classes here) scores for (rows,) targets; a negative target costs
    nothing.
    """
    return _RowLosses.apply(logits, target, classes, smoothing)


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, classes: Classes, smoothing: float) -> Tensor:
        start, length = classes.range()
        index = target - start
        inside = (index >= 0) & (index < length)
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = logits.amax(-1).to(wide)
        peak = classes.all_reduce(peak, dist.ReduceOp.MAX)
        sums = logits.new_zeros((3, len(logits)), dtype=wide)
        for rows in _slabs(logits):
            z = logits[rows].to(wide) - peak[rows, None]
            picked = z.gather(1, index[rows].clamp(0, length - 1)[:, None]).squeeze(1)
            sums[1, rows] = picked * inside[rows]
            sums[2, rows] = z.sum(-1)
            sums[0, rows] = z.exp_().sum(-1)
        sums = classes.all_reduce(sums)
        log_total = sums[0].log()
        loss = log_total - (1 - smoothing) * sums[1] - smoothing / classes.number * sums[2]
        ctx.save_for_backward(logits, peak + log_total, target)
        ctx.classes, ctx.smoothing = classes, smoothing
        return loss * (target >= 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        check_first_order("a loss of scores")
        (logits, norm, target), classes, smoothing = ctx.saved_tensors, ctx.classes, ctx.smoothing
        start, length = classes.range()
        grad, index = grad * (target >= 0), target - start
        inside = (index >= 0) & (index < length)
        out = torch.empty_like(logits)
        for rows in _slabs(logits):
            p = (logits[rows].to(norm.dtype) - norm[rows, None]).exp_()
            if smoothing:
                p -= smoothing / classes.number
            here = -(1 - smoothing) * inside[rows].to(norm.dtype)
            p.scatter_add_(1, index[rows].clamp(0, length - 1)[:, None], here[:, None])
            out[rows] = (p * grad[rows, None]).to(out.dtype)
        return out, None, None, None


def _slabs(logits: Tensor) -> Iterator[slice]:
    step = max(1, _SLAB // max(1, logits.size(1)))
    return (slice(a, a + step) for a in range(0, len(logits), step))
