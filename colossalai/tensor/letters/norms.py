"""The letters of norms and losses: what sums over rows, and what applies the same weights to each."""

from __future__ import annotations

from colossalai.tensor.letters.pointwise import broadcast, dims_of
from colossalai.tensor.letters.table import WHOLE, Letters, OpCall, OpLetters, register_letters


@register_letters("layer_norm", "rms_norm")
def _layer_norm(call: OpCall) -> OpLetters:
    x, inner = call.operands[0], len(call["normalized_shape"])
    letters = (*dims_of(x.shape)[: x.ndim - inner], *((WHOLE,) * inner))
    weights: list[Letters] = [(WHOLE,) * w.ndim for w in call.operands[1:]]
    return OpLetters((letters, *weights), (letters,))


@register_letters("group_norm")
def _group_norm(call: OpCall) -> OpLetters:
    x = call.operands[0]
    letters = ("d0", *((WHOLE,) * (x.ndim - 1)))
    return OpLetters((letters, *(((WHOLE,),) * (len(call.operands) - 1))), (letters,))


@register_letters("batch_norm")
def _batch_norm(call: OpCall) -> OpLetters:
    """Channels by themselves; a batch that is cut has the statistics of the whole, summed inside."""
    x = call.operands[0]
    letters = ("n", "c", *((WHOLE,) * (x.ndim - 2)))
    inside = frozenset(["n"] if call["training"] or call["running_mean"] is None else [])
    return OpLetters((letters, *((("c",),) * (len(call.operands) - 1))), (letters,), sums_inside=inside)


@register_letters("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(call: OpCall) -> OpLetters | None:
    """Rows may be cut: losses are summed, and so is the number of rows that count."""
    x, target = call.operands[:2]
    if x.ndim < 2 or len(call.operands) > 2 or target.ndim != x.ndim - 1:
        return None  # weights of classes, or targets that are probabilities
    rows = ("d0", *((WHOLE,) * (target.ndim - 1)))
    out: Letters = rows if call.outputs[0] else ()
    return OpLetters((("d0", WHOLE, *rows[1:]), rows), (out,))


@register_letters(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)
def _pointwise_loss(call: OpCall) -> OpLetters | None:
    """Losses of single elements, and their sum or mean."""
    x = call.operands[0]
    if call.name == "kl_div" or any(y.ndim > x.ndim for y in call.operands):
        return None
    letters = dims_of(x.shape)
    out: Letters = letters if call.outputs[0] == x.shape and call["reduction"] == 0 else ()
    if len(out) != len(call.outputs[0]):
        return None
    mean = not out and call["reduction"] == 1
    return OpLetters(tuple(broadcast(y.shape, x.shape, letters) for y in call.operands), (out,), mean=mean)
