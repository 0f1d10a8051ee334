"""Attention of one block of queries to one block of keys, of which a mask may hide a part.

A block that is entirely visible goes to the fastest kernel; one that is entirely hidden is skipped; any other
is computed in slabs of query rows, so that no mask of a whole block is ever in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from colossalai._numeric import round_up
from colossalai.mesh import random_key
from colossalai.nn.attention.kernels import (
    Gradients,
    block_backward,
    block_forward,
    find_kernel,
    plain_backward,
    plain_forward,
    sum_dtype,
)

# Elements of a mask, or of scores that a kernel does not keep to itself, that exist at a time.
_SLAB_CPU, _SLAB_GPU = 1 << 20, 1 << 24

Sight = Literal["all", "none", "some"]


@dataclass(frozen=True)
class Visibility:
    """What the queries of a block see of its keys."""

    sight: Sight = "all"
    causal: bool = False
    """Whether query i sees the keys up to i only."""
    queries: Tensor | None = None
    """Document numbers (batch, queries) and (batch, keys); None if all tokens are in one document."""
    keys: Tensor | None = None

    def visible(self, rows: slice, keys: int, device: torch.device) -> Tensor | None:
        """(batch or 1, rows, keys): which of the first keys the rows see; None if all of them."""
        seen = None
        if self.queries is not None and self.keys is not None:
            theirs = self.keys[:, None, :keys].to(device)
            seen = (self.queries[:, rows, None].to(device).abs() == theirs) & (theirs > 0)
        if not self.causal:
            return seen
        index = torch.arange(max(rows.stop, keys), device=device)
        before = (index[:keys] <= index[rows, None]).unsqueeze(0)
        return before if seen is None else seen & before


@dataclass(frozen=True)
class Documents:
    """Which tokens of a sequence may look at which: within the same document, and never at padding.

    The sequence is cut into as many equal chunks as ``bounds`` has columns.
    """

    numbers: Tensor
    """(batch, length): token i may look at j if number j is positive and the absolute value of number i."""
    bounds: Tensor | None
    """(4, batch, chunks), on the CPU: least and greatest number, and of their absolute values; None if the
    numbers have no values (a dry run).
    """
    chunks: int

    def view(self, queries: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> Visibility:
        """What the tokens of the chunks ``queries`` see of those in ``keys``."""
        if (sight := self.sight(queries, keys)) != "some":
            return Visibility(sight, causal)
        parts = self.numbers.chunk(self.chunks, 1)
        return Visibility(
            sight, causal, *(torch.cat([parts[i] for i in chunks], 1) for chunks in (queries, keys))
        )

    def sight(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> Sight:
        """How much of the chunks ``keys`` the chunks ``queries`` see in every sample, as far as the bounds
        tell.
        """
        if self.bounds is None:
            return "some"
        least, greatest = (
            f(self.bounds[i][:, list(keys)], 1) for i, f in enumerate((torch.amin, torch.amax))
        )
        low, high = (
            f(self.bounds[i + 2][:, list(queries)], 1) for i, f in enumerate((torch.amin, torch.amax))
        )
        if bool(((least == greatest) & (low == high) & (least == low) & (least > 0)).all()):
            return "all"
        return "none" if bool(((greatest <= 0) | (greatest < low) | (least > high)).all()) else "some"


# Every layer asks for the bounds of the same documents, and on a GPU the answer waits for all work before it.
_known_bounds: WeakIdKeyDictionary = WeakIdKeyDictionary()


def documents_in(numbers: Tensor, chunks: int) -> Documents:
    """``numbers`` (batch, length) with what :meth:`Documents.sight` needs."""
    if numbers.is_meta:
        return Documents(numbers, None, chunks)
    version, known, bounds = _known_bounds.get(numbers, (0, 0, None))
    if bounds is None or (version, known) != (numbers._version, chunks):
        parts = numbers.unflatten(1, (chunks, -1))
        sizes = parts.abs()
        bounds = torch.stack([parts.amin(2), parts.amax(2), sizes.amin(2), sizes.amax(2)]).cpu()
        _known_bounds[numbers] = numbers._version, chunks, bounds
    return Documents(numbers, bounds, chunks)


@dataclass(frozen=True)
class BlockDropout:
    """The dropout of one block: its probability, and the seed of its mask, which the backward pass draws
    again.
    """

    p: float
    seed: int

    def of_block(self, *names: int) -> BlockDropout:
        return BlockDropout(self.p, random_key(self.seed, *names) >> 1)

    def masks(self, device: torch.device) -> torch.Generator | None:
        return None if device.type == "meta" else torch.Generator(device).manual_seed(self.seed)

    def draw(self, q: Tensor, keys: int, generator: torch.Generator | None) -> Tensor:
        """What the probabilities of ``q``'s rows are multiplied by: 0, or 1 / (1 - p)."""
        kept = torch.empty((*q.shape[:3], keys), dtype=sum_dtype(q.dtype), device=q.device)
        return kept.bernoulli_(1 - self.p, generator=generator).div_(1 - self.p)


def _bias(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores: minus infinity where nothing is seen."""
    if visible is None:
        return None
    batch, rows, keys = visible.shape
    # kernels want rows that begin at a multiple of 16 bytes
    bias = torch.zeros((batch, 1, rows, round_up(keys, 16)), dtype=q.dtype, device=q.device)[..., :keys]
    return bias.masked_fill_(~visible.unsqueeze(1), -math.inf).expand(q.size(0), q.size(1), -1, -1)


@dataclass(frozen=True)
class _Slab:
    """Some rows of a block, with the keys that they can see at most."""

    rows: slice
    keys: slice
    visible: Tensor | None
    kept: Tensor | None


def _slabs(
    q: Tensor, k: Tensor, v: Tensor, view: Visibility, dropout: BlockDropout | None
) -> Iterator[_Slab]:
    length, generator = k.size(2), None if dropout is None else dropout.masks(q.device)
    bias = q.new_empty((1, 1, 1, round_up(length, 16)))[..., :length].expand(*q.shape[:3], length)
    # without a kernel the scores of every head are in memory, else one mask for all heads
    heads = 1 if dropout is None and find_kernel(q, k, v, bias, False) else q.size(1)
    limit = _SLAB_CPU if q.device.type == "cpu" else _SLAB_GPU
    step = max(1, limit // max(1, q.size(0) * heads * length))
    for begin in range(0, q.size(2), step):
        rows = slice(begin, min(begin + step, q.size(2)))
        keys = rows.stop if view.causal else length
        kept = None if dropout is None else dropout.draw(q[:, :, rows], keys, generator)
        yield _Slab(rows, slice(0, keys), view.visible(rows, keys, q.device), kept)


def attend(
    q: Tensor, k: Tensor, v: Tensor, view: Visibility, scale: float, dropout: BlockDropout | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the block; a row that sees nothing has minus infinity, and any output."""
    if view.sight == "all" and dropout is None and (done := block_forward(q, k, v, None, view.causal, scale)):
        return done
    out = q.new_empty((*q.shape[:3], v.size(3)), dtype=sum_dtype(q.dtype))
    lse = q.new_empty(q.shape[:3], dtype=out.dtype)
    for slab in _slabs(q, k, v, view, dropout):
        x, keys, values = q[:, :, slab.rows], k[:, :, slab.keys], v[:, :, slab.keys]
        visible, blind = slab.visible, None
        if visible is not None:
            # kernels differ in what a row without keys gives: let it see all, and forget what it saw
            blind = ~visible.any(-1, keepdim=True)
            visible = visible | blind
        bias = _bias(visible, q)
        done = block_forward(x, keys, values, bias, False, scale) if slab.kept is None else None
        part, sums = done or plain_forward(x, keys, values, bias, scale, slab.kept)
        out[:, :, slab.rows] = part
        lse[:, :, slab.rows] = sums if blind is None else sums.masked_fill(blind.mT, -math.inf)
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    view: Visibility,
    scale: float,
    dropout: BlockDropout | None,
) -> Gradients:
    """The block's part of the gradients of q, k and v; ``out`` and ``lse`` are those of all blocks, and the
    log-sum-exp of a row that sees nothing anywhere is plus infinity.
    """
    if view.sight == "all" and dropout is None:
        done = block_backward(grad, q, k, v, out, lse, None, view.causal, scale)
        if done is not None:
            return done
    dq, dk, dv = (torch.zeros_like(x, dtype=sum_dtype(x.dtype)) for x in (q, k, v))
    for slab in _slabs(q, k, v, view, dropout):
        g, x, y, sums = (t[:, :, slab.rows] for t in (grad, q, out, lse))
        keys, values = k[:, :, slab.keys], v[:, :, slab.keys]
        bias = _bias(slab.visible, q)
        done = None
        if slab.kept is None:
            done = block_backward(g, x, keys, values, y, sums, bias, False, scale)
        part_q, part_k, part_v = done or plain_backward(g, x, keys, values, y, sums, bias, scale, slab.kept)
        dq[:, :, slab.rows] = part_q
        dk[:, :, slab.keys] += part_k
        dv[:, :, slab.keys] += part_v
    return dq, dk, dv
