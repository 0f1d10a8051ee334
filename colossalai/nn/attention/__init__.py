"""Attention over a sequence that is cut over ranks: in rings, by exchanging it for heads (Ulysses), or both.

``kernels`` attends one block by the fastest kernel that gives a log-sum-exp, ``blocks`` adds masks and
dropout, ``ring`` sends the keys round and merges the blocks.  Here the sequence is exchanged for heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from colossalai._numeric import autocast_dtype
from colossalai.mesh import Axes, Layout, Mesh, random_key, redistribute
from colossalai.mesh.collectives import start_ring_shift
from colossalai.nn.attention.blocks import BlockDropout, documents_in
from colossalai.nn.attention.ring import How, Ring, RingAttention

__all__ = ["sequence_attention"]


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh | None,
    *,
    ring: str | None,
    heads: str | None,
    causal: bool,
    scale: float | None = None,
    documents: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend this rank's queries to the keys of the whole sequence.

    q is (batch, heads, local length, head dim), k and v are (batch, key heads, local length, head dim), where
    the key heads divide the heads: this rank's piece of a sequence that the axis ``ring`` cuts in zig-zag
    order (``Layout.zigzag``), and the axis ``heads`` each chunk of that, or the whole sequence.  An axis of
    one rank is as good as none.  The result is like q.

    ``ring``: the keys and values go round on this axis, see :mod:`colossalai.nn.attention.ring`.  ``heads``:
    on this axis of u ranks the sequence is exchanged for heads and back.  A rank sends (u - 1) / u of its q,
    k, v and output, forward and backward, where k and v count with as many heads as the ranks can share: key
    heads are repeated for that, and their gradients summed.

    ``documents`` is an integer for every token of the whole sequence, (batch, length), alike on all ranks:
    token i may look at j if ``documents[j]`` is positive and equals ``abs(documents[i])``.  So positive
    numbers are the documents of packed samples, and a negative one marks padding.  A token that may look at
    nothing gets 0.
    """
    ring, heads = (None if a is None or mesh is None or mesh.size[a] == 1 else a for a in (ring, heads))
    q, k, v = _as_autocast(q, k, v)
    _check(q, k, v, mesh, ring, heads, documents, dropout_p)
    if ring is None and heads is None and documents is None:
        return F.scaled_dot_product_attention(
            q, k, v, None, dropout_p, causal, scale=scale, enable_gqa=k.size(1) != q.size(1)
        )
    return _attend(q, k, v, mesh, ring, heads, causal, scale, documents, dropout_p)


# unlike torch.compiler.disable, it imports the compiler, which takes a second, at the first call
@_disable_dynamo
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh | None,
    ring: str | None,
    heads: str | None,
    causal: bool,
    scale: float | None,
    documents: Tensor | None,
    dropout_p: float,
) -> Tensor:
    place = Ring()
    if mesh is not None and ring is not None:
        place = Ring(mesh.coord[ring], mesh.size[ring], partial(start_ring_shift, mesh=mesh, axis=ring))
    dropout = None
    if dropout_p > 0:
        here = [] if mesh is None else [mesh.coord[a] for a in (ring, heads) if a is not None]
        dropout = BlockDropout(dropout_p, _next_seed(q.device)).of_block(*here)
    how = How(
        causal,
        1 / math.sqrt(q.size(-1)) if scale is None else scale,
        dropout,
        None if documents is None else documents_in(documents, place.chunks),
    )
    if mesh is None or heads is None:
        return RingAttention.apply(q, k, v, place, how)
    cut, exchanged = _layouts(ring, heads)
    q, k, v = _to_heads(q, k, v, mesh.size[heads], lambda x: redistribute(x, cut, exchanged, mesh))
    return redistribute(RingAttention.apply(q, k, v, place, how), exchanged, cut, mesh)


def _layouts(ring: str | None, heads: str) -> tuple[Layout, Layout]:
    """Where (batch, heads, length, head dim) lies before the exchange for heads and behind it."""
    before: Axes = () if ring is None else (ring,)
    zigzag = frozenset(before)
    return (
        Layout(((), (), (*before, heads), ()), zigzag=zigzag),
        Layout(((), (heads,), before, ()), zigzag=zigzag),
    )


def _to_heads(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, exchange: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    times = math.lcm(k.size(1), ranks) // k.size(1)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    if q.size(3) != v.size(3):
        return exchange(q), exchange(k), exchange(v)
    shares = [x.unflatten(1, (ranks, -1)) for x in (q, k, v)]
    return exchange(torch.cat(shares, 2).flatten(1, 2)).split([x.size(2) for x in shares], 1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh | None,
    ring: str | None,
    heads: str | None,
    documents: Tensor | None,
    dropout_p: float,
) -> None:
    """Refuse what all ranks see alike, before any of them waits for another."""
    if q.ndim != 4 or k.shape[:3] != v.shape[:3] or (k.size(0), k.shape[2:]) != (q.size(0), q.shape[2:]):
        raise ValueError(
            "q, k and v must be (batch, heads, local length, head dim) with equal batches and lengths, k and"
            f" v with equal heads, q and k with equal head dims; got {tuple(q.shape)}, {tuple(k.shape)} and"
            f" {tuple(v.shape)}"
        )
    if q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} query heads cannot share {k.size(1)} key heads: choose a divisor")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"the dropout probability must lie in [0, 1), got {dropout_p}")
    rings, shares = (1 if mesh is None or a is None else mesh.size[a] for a in (ring, heads))
    if q.size(1) % shares:
        raise ValueError(
            f"Ulysses attention cannot share {q.size(1)} query heads among {shares} ranks (axis {heads!r});"
            " choose a number of ranks that divides the heads, or attention='ring', which needs no heads"
        )
    if rings > 1 and (q.size(2) * shares) % 2:
        raise ValueError(
            f"a rank of the ring holds two chunks of the sequence, but its length {q.size(2)} is odd;"
            f" pad the sequence to a multiple of {2 * rings * shares}"
        )
    length = q.size(2) * rings * shares
    if documents is not None and tuple(documents.shape) != (q.size(0), length):
        raise ValueError(
            f"documents must have a number for every token of the whole sequence, ({q.size(0)}, {length}),"
            f" got {tuple(documents.shape)}"
        )


def _as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as torch's own attention takes them in an autocast block."""
    dtype = autocast_dtype(q.device)
    if dtype is not None and q.dtype != torch.float64:
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _next_seed(device: torch.device) -> int:
    """A seed from the generator of the device, which goes on, without waiting for the device."""
    if device.type == "cpu":
        return int(torch.randint(2**62, ()))
    if device.type == "meta":
        return 0
    state = torch.cuda.get_rng_state(device)
    torch.empty(1, device=device).uniform_()
    return random_key(0, bytes(state.tolist()).hex())
