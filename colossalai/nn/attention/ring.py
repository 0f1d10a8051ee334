"""Ring attention: every rank keeps its queries, and the keys and values go round.

On a ring of n ranks the sequence lies in zig-zag order (``Layout.zigzag``): rank i holds the chunks i (early)
and 2 n - 1 - i (late) of 2 n.  In step s it has the keys of rank j = i - s:

======  ==================================  ===========================
keys    causal                              not causal
======  ==================================  ===========================
j = i   all x all, each up to itself        all x all
j < i   all queries x the early keys        all x all
j > i   the late queries x all keys         all x all
======  ==================================  ===========================

so all ranks have the same work in every step.  The blocks' outputs are merged by their log-sum-exps.  What is
kept for the backward pass is q, k, v, the output and its log-sum-exp, all of this rank; k and v go round
again, and the gradient of a block of keys follows it, from the rank after its owner round to the owner.

With K bytes of k and v together on a rank and G bytes of their gradients in the dtype of sums (float32 for
half precision, else their own), a rank sends (n - 1) K bytes forward and (n - 1) (K + G) backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel import block_sums
from colossalai.kernel.block_sums import AT_ONCE, Block
from colossalai.mesh.collectives import Pending
from colossalai.mesh.first_order import check_first_order
from colossalai.nn.attention.blocks import BlockDropout, Documents, Visibility, attend, attend_backward
from colossalai.nn.attention.kernels import Gradients, sum_dtype
from colossalai.utils.activation_checkpoint import computed_again

_ALL = slice(None)


@dataclass(frozen=True)
class Ring:
    """This rank's place on a ring, and how a tensor goes to the next rank while the one before sends its
    own.
    """

    index: int = 0
    size: int = 1
    start_shift: Callable[[Tensor], Pending] = lambda x: lambda: x

    @property
    def chunks(self) -> int:
        return 2 * self.size if self.size > 1 else 1

    def held(self, index: int) -> tuple[int, ...]:
        """The chunks of the sequence that rank ``index`` holds."""
        return (index, 2 * self.size - 1 - index) if self.size > 1 else (0,)


@dataclass(frozen=True)
class How:
    """What attention is asked for."""

    causal: bool
    scale: float
    dropout: BlockDropout | None = None
    documents: Documents | None = None


@dataclass(frozen=True)
class _RingStep:
    """The part of a step that is to be computed."""

    rows: slice
    keys: slice
    view: Visibility
    dropout: BlockDropout | None


def _block(ring: Ring, step: int, length: int, how: How) -> _RingStep:
    source = (ring.index - step) % ring.size
    queries, keys = ring.held(ring.index), ring.held(source)
    rows = cols = _ALL
    if how.causal and source < ring.index:
        keys, cols = keys[:1], slice(0, length // 2)
    elif how.causal and source > ring.index:
        queries, rows = queries[1:], slice(length // 2, length)
    view = Visibility(causal=how.causal and step == 0)
    if how.documents is not None:
        view = how.documents.view(queries, keys, view.causal)
    dropout = None if how.dropout is None else how.dropout.of_block(ring.index, source)
    return _RingStep(rows, cols, view, dropout)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring, how: How) -> tuple[Tensor, Tensor]:
    """This rank's output, and its log-sum-exp as :func:`ring_backward` takes it."""
    merged = _Merged(q, v)
    for step in range(ring.size):
        pending = _start_shifts(ring, k, v) if step < ring.size - 1 else None
        block = _block(ring, step, q.size(2), how)
        if block.view.sight != "none":
            keys, values = k[:, :, block.keys], v[:, :, block.keys]
            part, sums = attend(q[:, :, block.rows], keys, values, block.view, how.scale, block.dropout)
            merged.add(block.rows, part, sums)
        if pending is not None:
            k, v = pending()
    out, lse = merged.result()
    if how.documents is not None:
        blind = lse == -math.inf
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(blind, math.inf)  # so that the probabilities of the backward pass are 0
    return out.to(q.dtype), lse


class _Merged:
    """The outputs of blocks, weighted by their shares of the sum of exponentials.

    Some of them wait and are added together: to weight again what was added before costs a pass over memory.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.shape, self.dtype, self.ends_in = (*q.shape[:3], v.size(3)), sum_dtype(q.dtype), q.dtype
        self.out: Tensor | None = None
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=self.dtype)
        self.waiting: list[tuple[slice, Tensor, Tensor]] = []

    def add(self, rows: slice, part: Tensor, sums: Tensor) -> None:
        """Take the output and the log-sum-exp of a block of ``rows``."""
        if len(self.waiting) == AT_ONCE:
            self._add_up(self.dtype)
        self.waiting.append((rows, part, sums))

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all blocks; 0 and minus infinity where there was none."""
        if self.out is None and len(self.waiting) == 1 and self.waiting[0][0] == _ALL:
            return self.waiting[0][1:]
        if self.waiting:
            self._add_up(self.ends_in)
        out = self.lse.new_zeros(self.shape) if self.out is None else self.out
        return out, self.lse

    def _add_up(self, dtype: torch.dtype) -> None:
        if block_sums.available(self.waiting[0][1]) and self.dtype is torch.float32:
            blocks = [Block(rows.start or 0, part, sums) for rows, part, sums in self.waiting]
            out = self.lse.new_empty(self.shape, dtype=dtype)
            self.out = block_sums.add_blocks(blocks, self.out, out, self.lse)
        else:
            self._compose()
        self.waiting.clear()

    def _compose(self) -> None:
        lse = self.lse.clone()
        for rows, _, sums in self.waiting:
            lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], sums)
        if self.out is not None:
            self.out *= _share(self.lse, lse)
        for rows, part, sums in self.waiting:
            share = _share(sums, lse[:, :, rows])
            if self.out is None and rows == _ALL:
                self.out = part * share
                continue
            if self.out is None:
                self.out = lse.new_zeros(self.shape)
            self.out[:, :, rows].addcmul_(part, share)
        self.lse = lse


def _share(sums: Tensor, total: Tensor) -> Tensor:
    """The share of the exponentials behind ``sums`` in all; nan (nothing of nothing) becomes 0."""
    return (sums - total).exp_().nan_to_num_(0.0).unsqueeze(-1)


def ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ring: Ring, how: How
) -> Gradients:
    """The gradients of this rank's q, k and v."""
    of_queries = _Sums(q)
    own: Gradients | None = None  # by this rank's queries and keys
    arriving: Callable[[], tuple[Tensor, Tensor]] | None = None  # of the keys that are here, by ranks before
    for step in range(ring.size):
        pending = _start_shifts(ring, k, v) if step < ring.size - 1 else None
        block, parts = _block(ring, step, q.size(2), how), None
        if block.view.sight != "none":
            g, x, y, sums = (t[:, :, block.rows] for t in (grad, q, out, lse))
            keys, values = k[:, :, block.keys], v[:, :, block.keys]
            parts = attend_backward(g, x, keys, values, y, sums, block.view, how.scale, block.dropout)
            of_queries.add(block.rows, parts[0])
        if step == 0:
            own = parts
        else:
            dk, dv = (None, None) if arriving is None else arriving()
            dk = _add(dk, [] if parts is None else [(block.keys, parts[1])], k)
            dv = _add(dv, [] if parts is None else [(block.keys, parts[2])], v)
            arriving = _start_shifts(ring, dk, dv)
        if pending is not None:
            k, v = pending()
    dk, dv = (None, None) if arriving is None else arriving()
    return (
        of_queries.result(),
        _add(dk, [] if own is None else [(_ALL, own[1])], k, k.dtype),
        _add(dv, [] if own is None else [(_ALL, own[2])], v, v.dtype),
    )


def _start_shifts(ring: Ring, a: Tensor, b: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    first, second = ring.start_shift(a), ring.start_shift(b)
    return lambda: (first(), second())


class _Sums:
    """Gradients of ``like`` by blocks; where one kernel adds several, some of them wait for each other."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.sums: Tensor | None = None
        self.waiting: list[tuple[slice, Tensor]] = []
        self.at_once = AT_ONCE if block_sums.available(like) else 1

    def add(self, rows: slice, part: Tensor) -> None:
        if len(self.waiting) == self.at_once:
            self.sums = _add(self.sums, self.waiting, self.like)
            self.waiting = []
        self.waiting.append((rows, part))

    def result(self) -> Tensor:
        return _add(self.sums, self.waiting, self.like, self.like.dtype)


def _add(
    sums: Tensor | None, parts: list[tuple[slice, Tensor]], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """``sums`` of the shape of ``like`` (None for zeros), with ``parts`` added to some of its rows.

    In the dtype of sums, where ``sums`` is changed in place, unless ``dtype`` says what the result is for.
    """
    wide = sum_dtype(like.dtype)
    if sums is None and len(parts) == 1 and parts[0][0] == _ALL:
        return parts[0][1].to(dtype or wide)
    if parts and wide is torch.float32 and block_sums.available(like):
        out = sums if sums is not None and dtype is None else torch.empty_like(like, dtype=dtype or wide)
        return block_sums.add_blocks([Block(rows.start or 0, part) for rows, part in parts], sums, out)
    if sums is None:
        sums = torch.zeros_like(like, dtype=wide)
    elif dtype is not None and len(parts) == 1 and parts[0][0] == _ALL:
        return torch.add(sums, parts[0][1], out=torch.empty_like(like, dtype=dtype))  # one pass over memory
    for rows, part in parts:
        sums[:, :, rows] += part
    return sums.to(dtype or wide)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


class RingAttention(torch.autograd.Function):
    """:func:`ring_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, how: How) -> Tensor:
        with _without_autocast(q.device), computed_again():
            out, lse = ring_forward(q, k, v, ring, how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.how = ring, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        check_first_order("attention")
        q, k, v, out, lse = ctx.saved_tensors
        return *ring_backward(grad, q, k, v, out, lse, ctx.ring, ctx.how), None, None
