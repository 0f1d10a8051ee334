"""The letters of products: matrices, convolutions, lookups, attention."""

from __future__ import annotations

from colossalai.tensor.letters.pointwise import broadcast
from colossalai.tensor.letters.table import WHOLE, Letters, OpCall, OpLetters, register_letters


def _rows(n: int, letter: str = "m") -> Letters:
    return tuple(f"{letter}{i}" for i in range(n))


@register_letters("linear")
def _linear(call: OpCall) -> OpLetters | None:
    x, weight = call.operands[:2]
    if weight.ndim < 2:
        return None
    rows = _rows(x.ndim - 1)
    operands: list[Letters] = [(*rows, "k"), ("n", "k")]
    biased = call["bias"] is not None
    return OpLetters(
        tuple(operands + [("n",)] * biased), ((*rows, "n"),), bias=frozenset([2] if biased else [])
    )


@register_letters("addmm")
def _addmm(call: OpCall) -> OpLetters:
    bias = broadcast(call.operands[0].shape, call.outputs[0], ("m0", "n"))
    return OpLetters((bias, ("m0", "k"), ("k", "n")), (("m0", "n"),), bias=frozenset([0]))


@register_letters("mm", "bmm", "matmul")
def _matmul(call: OpCall) -> OpLetters | None:
    a, b = call.operands
    if a.ndim < 2 or b.ndim < 2:
        return None
    batch = _rows(len(call.outputs[0]) - 2, "b")
    left = broadcast(a.shape[:-2], call.outputs[0][:-2], batch)
    right = broadcast(b.shape[:-2], call.outputs[0][:-2], batch)
    return OpLetters(((*left, "m0", "k"), (*right, "k", "n")), ((*batch, "m0", "n"),))


@register_letters("einsum")
def _einsum(call: OpCall) -> OpLetters | None:
    equation = str(call["equation"]).replace(" ", "")
    if "." in equation or "->" not in equation or call["path"] is not None:
        return None
    left, right = equation.split("->")
    operands = tuple(tuple(part) for part in left.split(","))
    if any(len(set(part)) != len(part) for part in (*operands, right)):
        return None  # a diagonal
    return OpLetters(operands, (tuple(right),))


@register_letters("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(call: OpCall) -> OpLetters | None:
    x, biased = call.operands[0], call["bias"] is not None
    if isinstance(call["padding"], str) or len(call.outputs[0]) != x.ndim:
        return None
    space = (WHOLE,) * (len(call.operands[1].shape) - 2)
    batch: Letters = ("m0",) if x.ndim == len(space) + 2 else ()
    groups = call["groups"] or 1
    inward, outward = ("k", "n") if groups == 1 else (WHOLE, WHOLE)
    weight = (inward, outward) if "transpose" in call.name else (outward, inward)
    operands: list[Letters] = [(*batch, inward, *space), (*weight, *space)]
    return OpLetters(
        tuple(operands + [(outward,)] * biased),
        ((*batch, outward, *space),),
        bias=frozenset([2] if biased else []),
    )


@register_letters("embedding")
def _embedding(call: OpCall) -> OpLetters | None:
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None  # which look at the whole batch, or have other gradients
    rows = _rows(call.tensor("indices").ndim)
    return OpLetters((("v", "n"), rows), ((*rows, "n"),))


@register_letters("scaled_dot_product_attention")
def _attention(call: OpCall) -> OpLetters | None:
    query, key = call.operands[:2]
    if query.ndim < 3 or query.ndim != key.ndim:
        return None
    batch = _rows(query.ndim - 2, "b")
    operands: list[Letters] = []
    for operand in call.operands[:3]:
        lead = operand.shape[:-2]
        # with grouped queries, a head of the keys serves neighbouring heads of the queries
        same = broadcast(lead, call.outputs[0][:-2], batch) if not call["enable_gqa"] else batch
        operands.append((*same, WHOLE, WHOLE))
    for mask in call.operands[3:]:
        lead = mask.shape[:-2]
        operands.append((*broadcast(lead, call.outputs[0][:-2], batch), *((WHOLE,) * min(2, mask.ndim))))
    return OpLetters(tuple(operands), ((*batch, WHOLE, WHOLE),))
