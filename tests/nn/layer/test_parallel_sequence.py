"""The documented parts of sequence parallelism equal the serial model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import colossalai
from colossalai.mesh import count_communication
from colossalai.nn import AttnMaskType, RingAV, RingQK, TransformerSelfAttentionRing
from colossalai.nn.layer.parallel_sequence import RingQK as DocumentedRingQK
from colossalai.testing import spawn

BATCH, HEADS, WIDTH, LENGTH = 2, 3, 4, 12


def minus_much(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -10000.0)


def whole_attention(layer: TransformerSelfAttentionRing, hidden: Tensor, hidden_keys: Tensor) -> Tensor:
    """What the layer means, written for one rank with torch's attention."""
    q, k, v = (
        layer.query_key_value(hidden).view(LENGTH, BATCH, HEADS, 3 * WIDTH).permute(1, 2, 0, 3).chunk(3, -1)
    )
    seen = ~hidden_keys.expand(BATCH, 1, LENGTH, LENGTH)
    if layer.attn_mask_type is not AttnMaskType.padding:
        seen = seen.tril()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    return out.permute(2, 0, 1, 3).reshape(hidden.shape) @ layer.dense.weight.T


def ring_parts(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = BATCH * HEADS, LENGTH
    q, k, v, grad = (torch.randn(*rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4))
    part = LENGTH // world_size
    mine = slice(rank * part, (rank + 1) * part)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = whole[0] @ whole[1].mT
    out = scores @ whole[2]
    out.backward(grad)
    local = [x[:, mine].clone().requires_grad_() for x in (q, k, v)]
    with count_communication() as log:
        sub_scores = RingQK.apply(local[0], local[1], BATCH, HEADS, part)
        sub_out = RingAV.apply(sub_scores, local[2], BATCH, HEADS, WIDTH, part)
        sub_out.backward(grad[:, mine])
    torch.testing.assert_close(sub_scores, scores[:, mine])
    torch.testing.assert_close(sub_out, out[:, mine])
    for a, b in zip(local, whole, strict=True):
        torch.testing.assert_close(a.grad, b.grad[:, mine])
    piece = local[0].numel() * 8
    assert log.sent() == log.sent("shift") == (world_size - 1) * 6 * piece
    with pytest.raises(ValueError, match=r"RingQK: sub_k must have the shape \(6, "):
        RingQK.apply(local[0], k.repeat(1, 2, 1), BATCH, HEADS, part)
    with pytest.raises(ValueError, match="RingAV: attention_score must have the shape"):
        RingAV.apply(sub_scores[..., 1:], local[2], BATCH, HEADS, WIDTH, part)


def attention(rank: int, world_size: int) -> None:
    part = LENGTH // world_size
    mine = slice(rank * part, (rank + 1) * part)
    for kind, scaling, fusion in itertools.product(AttnMaskType, (False, True), (False, True)):
        torch.manual_seed(0)
        layer = TransformerSelfAttentionRing(
            HEADS * WIDTH,
            HEADS,
            0.0,
            minus_much,
            2,
            apply_query_key_layer_scaling=scaling,
            attn_mask_type=kind,
            masked_softmax_fusion=fusion,
        ).double()
        hidden = torch.randn(LENGTH, BATCH, HEADS * WIDTH, dtype=torch.float64)
        padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        padding[1, ..., -3:] = True
        serial, mask = copy.deepcopy(layer), padding.expand(-1, -1, part, -1)
        expected = whole_attention(serial, hidden, padding)
        out, bias = layer(hidden[mine], mask)
        assert bias is layer.dense.bias
        torch.testing.assert_close(out, expected[mine])
        expected.square().sum().backward()
        out.square().sum().backward()
        for (name, p), s in zip(layer.named_parameters(), serial.parameters(), strict=True):
            if name != "dense.bias":
                torch.distributed.all_reduce(p.grad)  # a sum over all rows
                torch.testing.assert_close(p.grad, s.grad)
    dropped = TransformerSelfAttentionRing(HEADS * WIDTH, HEADS, 0.5, minus_much, 1)
    out, _ = dropped(torch.ones(part, BATCH, HEADS * WIDTH), None)
    others = [torch.empty_like(out) for _ in range(world_size)]
    torch.distributed.all_gather(others, out.detach())
    assert not torch.equal(*others[:2])  # equal rows, different masks


def on_ranks(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": world_size, "mode": "sequence"}}}
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    ring_parts(rank, world_size)
    attention(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_parts_equal_the_serial_ones(world_size: int) -> None:
    spawn(on_ranks, world_size)


def test_one_rank_needs_no_launch() -> None:
    assert DocumentedRingQK is RingQK
    q = torch.randn(6, 4, 8)
    torch.testing.assert_close(RingQK.apply(q, q, 2, 3, 4), q @ q.mT)
    layer = TransformerSelfAttentionRing(8, 2, 0.1, None, 1)
    out, bias = layer(torch.randn(4, 2, 8), None)
    assert (out.shape, bias.shape) == ((4, 2, 8), (8,))


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_attention_heads=3 does not divide hidden_size=8"):
        TransformerSelfAttentionRing(8, 3, 0.0, None, 1)
    with pytest.raises(ValueError, match="counted from 1, got layer_number=0"):
        TransformerSelfAttentionRing(8, 2, 0.0, None, 0)
