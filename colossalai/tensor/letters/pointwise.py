"""The letters of functions of single elements, of reductions, and of what runs along one dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colossalai.tensor.letters.table import (
    WHOLE,
    Letters,
    OpCall,
    OpLetters,
    Shape,
    register_letters,
)

_POINTWISE = """
    abs neg positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan
    sinh cosh tanh asinh acosh atanh atan erf erfc sigmoid log_sigmoid relu relu6 leaky_relu elu
    selu celu gelu silu mish softplus softshrink hardshrink hardtanh hardswish hardsigmoid threshold
    sign sgn floor ceil round trunc frac nan_to_num isnan isinf isfinite logical_not bitwise_not
    contiguous clone detach alias to type_as float half bfloat16 lift_fresh_copy lift_fresh _to_copy
    dropout native_dropout alpha_dropout add sub rsub mul div true_divide floor_divide remainder
    fmod pow maximum minimum fmax fmin where masked_fill clamp clamp_min clamp_max lerp addcmul
    addcdiv eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    __and__ __or__ __xor__ atan2 hypot copysign xlogy zeros_like ones_like full_like empty_like zero
    fill copy
""".split()  # noqa: SIM905


def broadcast(shape: Shape, out: Shape, letters: Letters) -> Letters:
    """The letters of a tensor of ``shape`` that is broadcast to ``out``, whose dims have ``letters``."""
    skipped = len(out) - len(shape)
    return tuple(
        letter if n == to else WHOLE
        for n, to, letter in zip(shape, out[skipped:], letters[skipped:], strict=True)
    )


def dims_of(out: Shape) -> Letters:
    """A letter for each dim."""
    return tuple(f"d{i}" for i in range(len(out)))


@register_letters(*_POINTWISE, *(f"{name}_" for name in _POINTWISE))
def _pointwise(call: OpCall) -> OpLetters | None:
    out = call.outputs[0]
    if any(shape != out for shape in call.outputs) or any(len(x.shape) > len(out) for x in call.operands):
        return None
    letters = dims_of(out)
    return OpLetters(
        tuple(broadcast(x.shape, out, letters) for x in call.operands), (letters,) * len(call.outputs)
    )


@register_letters("min", "max")
def _extremes(call: OpCall) -> OpLetters | None:
    """``min(a, b)`` of single elements; of one tensor it is a reduction."""
    return _pointwise(call) if call["other"] is not None else _along(call)


def chosen_dims(value: Any, ndim: int) -> set[int]:
    """Which dims an argument ``dim`` names; all if it is None or empty."""
    if value is None or (isinstance(value, Sequence) and not value):
        return set(range(ndim))
    return {d % ndim if ndim else d for d in ([value] if isinstance(value, int) else value)}


@register_letters("sum", "mean")
def _sum(call: OpCall) -> OpLetters:
    """Dims that are summed may be cut; the mean of a piece counts as much as the piece is of the whole."""
    x = call.operands[0]
    gone, letters = chosen_dims(call["dim"], x.ndim), dims_of(x.shape)
    kept = tuple(WHOLE if d in gone else name for d, name in enumerate(letters))
    out = kept if call["keepdim"] else tuple(name for d, name in enumerate(kept) if d not in gone)
    return OpLetters((letters,), (out,))


@register_letters(
    "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "flip", "roll", "diff"
)
def _along(call: OpCall) -> OpLetters | None:
    """What looks at whole rows along the named dims; the others may be cut."""
    x = call.operands[0]
    if call.name == "diff" or len(call.operands) > 1:
        return None
    named = call["dims"] if call["dims"] is not None else call["dim"]
    if call.name in ("sort", "topk") and named is None:
        named = -1
    gone = chosen_dims(named, x.ndim)
    letters = tuple(WHOLE if d in gone else name for d, name in enumerate(dims_of(x.shape)))
    outputs = []
    for shape in call.outputs:
        if len(shape) == x.ndim:
            outputs.append(letters)
        elif len(shape) == x.ndim - len(gone):
            outputs.append(tuple(name for d, name in enumerate(letters) if d not in gone))
        else:
            return None
    return OpLetters((letters,), tuple(outputs))


register_letters("amax", "amin", "argmax", "argmin", "var", "std", "logsumexp", "any", "all", "prod", "norm")(
    _along
)


@register_letters("tril", "triu", "tril_", "triu_")
def _triangle(call: OpCall) -> OpLetters:
    letters = (*dims_of(call.outputs[0])[:-2], WHOLE, WHOLE)
    return OpLetters((letters,), (letters,))


@register_letters("gather", "index_select", "scatter", "scatter_add", "index_add")
def _by_index(call: OpCall) -> OpLetters | None:
    """Along ``dim`` every index may ask for every element; the other dims are those of the index."""
    x = call.operands[0]
    dim = int(call["dim"]) % max(1, x.ndim)
    letters = tuple(WHOLE if d == dim else name for d, name in enumerate(dims_of(x.shape)))
    if call.name == "index_select":
        return OpLetters((letters, (WHOLE,)), (letters,))
    shapes = [*(y.shape for y in call.operands), *call.outputs]
    if call.name not in ("gather", "scatter") or any(len(shape) != x.ndim for shape in shapes):
        return None
    same = [len({shape[d] for shape in shapes}) == 1 for d in range(x.ndim)]
    letters = tuple(name if same[d] else WHOLE for d, name in enumerate(letters))
    return OpLetters((letters,) * len(call.operands), (letters,))
