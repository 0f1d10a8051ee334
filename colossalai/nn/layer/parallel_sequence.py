"""The documented parts of sequence parallelism: scores and weighted sums whose keys and values go round.

The sequence is cut into contiguous pieces, in the order of the ranks of ``ParallelMode.SEQUENCE``.  These
parts hold whole rows of scores, as their arguments say; models use
:func:`colossalai.nn.attention.sequence_attention`, which holds none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.kernel import AttnMaskType, FusedScaleMaskSoftmax
from colossalai.mesh import Mesh
from colossalai.mesh.collectives import Pending, start_ring_shift
from colossalai.mesh.first_order import check_first_order
from colossalai.nn.layer.dropout import WrappedDropout

__all__ = ["AttnMaskType", "RingAV", "RingQK", "TransformerSelfAttentionRing"]

_RING = "sp"


def _place() -> tuple[Mesh | None, int, int]:
    """The mesh, and this rank's place among the ranks that share a sequence."""
    if not gpc.is_initialized(ParallelMode.SEQUENCE):
        return None, 0, 1
    mesh, size = gpc.mesh, gpc.get_world_size(ParallelMode.SEQUENCE)
    if size != mesh.size[_RING]:
        raise RuntimeError(
            f"RingQK and RingAV go round on one ring, but {size} ranks share a sequence and the ring has"
            f" {mesh.size[_RING]}: use colossalai.nn.attention.sequence_attention with both axes"
        )
    return mesh, mesh.coord[_RING], size


def _round(mine: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The pieces of all ranks of the ring with their places, beginning with this rank's; the next one travels
    while the caller uses one.
    """
    mesh, here, size = _place()
    for step in range(size):
        pending = start_ring_shift(mine, mesh, _RING) if mesh is not None and step < size - 1 else None
        yield (here - step) % size, mine
        if pending is not None:
            mine = pending()


def _sum_round(part: Callable[[int], Tensor]) -> Tensor:
    """The sum over the ring of what every rank has for this one; ``part(i)`` is for the rank at place i."""
    mesh, here, size = _place()
    pending: Pending | None = None
    for step in range(1, size):
        assert mesh is not None
        travelling = part((here - step) % size)
        if pending is not None:
            travelling = travelling + pending()
        pending = start_ring_shift(travelling, mesh, _RING)
    own = part(here)
    return own if pending is None else own + pending()


def _columns(scores: Tensor, place: int, length: int) -> Tensor:
    return scores[..., place * length : (place + 1) * length]


def _check(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} must have the shape {expected}, got {tuple(x.shape)}")


class RingQK(torch.autograd.Function):
    """``RingQK.apply`` gives the scores of this rank's queries with the keys of the whole sequence.

    sub_q and sub_k are (batch x heads, sub_seq_length, head dim), the scores (batch x heads, sub_seq_length,
    length).
    """

    @staticmethod
    def forward(
        ctx: Any,
        sub_q: Tensor,
        sub_k: Tensor,
        batch_size: int,
        num_attention_heads: int,
        sub_seq_length: int,
    ) -> Tensor:
        expected = batch_size * num_attention_heads, sub_seq_length, sub_q.size(-1)
        _check("RingQK: sub_q", sub_q, expected)
        _check("RingQK: sub_k", sub_k, expected)
        ctx.save_for_backward(sub_q, sub_k)
        size = _place()[2]
        scores = sub_q.new_empty((*expected[:2], size * sub_seq_length))
        for place, keys in _round(sub_k):
            _columns(scores, place, sub_seq_length).copy_(sub_q @ keys.mT)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        check_first_order("RingQK")
        sub_q, sub_k = ctx.saved_tensors
        length, dq = sub_q.size(1), torch.zeros_like(sub_q)
        for place, keys in _round(sub_k):
            dq += _columns(grad, place, length) @ keys
        return dq, _sum_round(lambda place: _columns(grad, place, length).mT @ sub_q), None, None, None


class RingAV(torch.autograd.Function):
    """``RingAV.apply`` gives the sum of the values of the whole sequence, weighted by this rank's rows of
    ``attention_score``.

    attention_score is (batch x heads, sub_seq_length, length), sub_v and the result are (batch x heads,
    sub_seq_length, attention_head_size).
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention_score: Tensor,
        sub_v: Tensor,
        batch_size: int,
        num_attention_heads: int,
        attention_head_size: int,
        sub_seq_length: int,
    ) -> Tensor:
        rows = batch_size * num_attention_heads, sub_seq_length
        _check("RingAV: sub_v", sub_v, (*rows, attention_head_size))
        _check("RingAV: attention_score", attention_score, (*rows, _place()[2] * sub_seq_length))
        ctx.save_for_backward(attention_score, sub_v)
        out = torch.zeros_like(sub_v)
        for place, values in _round(sub_v):
            out += _columns(attention_score, place, sub_seq_length) @ values
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        check_first_order("RingAV")
        scores, sub_v = ctx.saved_tensors
        length, of_scores = sub_v.size(1), torch.empty_like(scores)
        for place, values in _round(sub_v):
            _columns(of_scores, place, length).copy_(grad @ values.mT)
        dv = _sum_round(lambda place: _columns(scores, place, length).mT @ grad)
        return of_scores, dv, None, None, None, None


class _LinearWithLateBias(nn.Linear):
    """``nn.Linear`` that hands its bias to the caller, who adds it together with something else."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


class TransformerSelfAttentionRing(nn.Module):
    """Self-attention of a transformer whose sequence is cut over the ranks of ``ParallelMode.SEQUENCE``.

    ``forward(hidden_states, attention_mask)`` takes this rank's (sub sequence, batch, hidden) and a mask that
    is true for what must not be seen, of a shape that fits (batch, heads, sub sequence, whole sequence); it
    returns the output, of the shape of hidden_states, and the bias that is still to be added to it.

    Args:
        attention_mask_func: ``attention_mask_func(scores, mask)`` gives scores that are small where the mask
            is true; used with ``masked_softmax_fusion=False``.
        layer_number: counted from 1; with ``apply_query_key_layer_scaling`` scores are divided by it and
            multiplied again in float32, against overflow of half precision.
        fp16, bf16: the dtype that scores will have; others are refused.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        attention_dropout: float,
        attention_mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        layer_number: int,
        apply_query_key_layer_scaling: bool = False,
        convert_fp16_to_fp32_in_softmax: bool = False,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        masked_softmax_fusion: bool = True,
        fp16: bool = False,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"num_attention_heads={num_attention_heads} does not divide hidden_size={hidden_size}"
            )
        if layer_number < 1:
            raise ValueError(f"layers are counted from 1, got layer_number={layer_number}")
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.hidden_size_per_attention_head = hidden_size // num_attention_heads
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        again = layer_number if apply_query_key_layer_scaling else None
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head) * (again or 1)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = _LinearWithLateBias(hidden_size, hidden_size)
        # a rank has some rows only, so what is causal about them is part of the mask
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            fp16,
            bf16,
            AttnMaskType.padding,
            masked_softmax_fusion,
            attention_mask_func,
            convert_fp16_to_fp32_in_softmax or apply_query_key_layer_scaling,
            again,
        )
        cut = gpc.is_initialized(ParallelMode.SEQUENCE)
        self.attention_dropout = WrappedDropout(attention_dropout, mode=ParallelMode.TENSOR if cut else None)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        length, batch, _ = hidden_states.shape
        heads, width = self.num_attention_heads, self.hidden_size_per_attention_head
        mixed = self.query_key_value(hidden_states).view(length, batch * heads, 3 * width)
        q, k, v = mixed.transpose(0, 1).chunk(3, -1)
        scores = RingQK.apply(q / self.norm_factor, k, batch, heads, length)
        mask = self._with_future(attention_mask, length, scores)
        weights = self.scale_mask_softmax(scores.view(batch, heads, length, -1), mask)
        weights = self.attention_dropout(weights).flatten(0, 1)
        context = RingAV.apply(weights, v, batch, heads, width, length)
        return self.dense(context.transpose(0, 1).reshape(length, batch, -1))

    def _with_future(self, mask: Tensor | None, length: int, scores: Tensor) -> Tensor | None:
        if self.attn_mask_type is AttnMaskType.padding:
            return mask
        keys = torch.arange(scores.size(-1), device=scores.device)
        first = _place()[1] * length
        future = keys > keys[first : first + length, None]
        return future if mask is None else mask.bool() | future
