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
    fill copy acos asin absolute conj_physical resolve_conj resolve_neg angle deg2rad rad2deg digamma lgamma
    erfinv i0 sinc logit signbit isposinf isneginf isreal isneginf isposinf clip subtract multiply divide
    float_power ldexp logaddexp logaddexp2 heaviside nextafter gcd lcm bitwise_left_shift
    bitwise_right_shift __lshift__ __rshift__ __ilshift__ __irshift__ __iand__ __ior__ __ixor__ greater
    greater_equal less less_equal not_equal arccos arcsin arctan arctan2 arccosh arcsinh
    arctanh fix negative polygamma mvlgamma isclose softsign tanhshrink hardswish log_sigmoid special_expit
    special_erf special_erfc special_entr special_log1p special_expm1 special_xlog1py special_ndtr
    special_i0e special_i1 special_i1e double int long short bool half bfloat16 real
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


@register_letters("sum", "mean", "nansum")
def _sum(call: OpCall) -> OpLetters:
    """Dims that are summed may be cut; the mean of a piece counts as much as the piece is of the whole."""
    x = call.operands[0]
    gone, letters = chosen_dims(call["dim"], x.ndim), dims_of(x.shape)
    kept = tuple(WHOLE if d in gone else name for d, name in enumerate(letters))
    out = kept if call["keepdim"] else tuple(name for d, name in enumerate(kept) if d not in gone)
    return OpLetters((letters,), (out,), mean=call.name == "mean")


@register_letters(
    "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "topk", "flip", "roll", "diff",
    "cumsum_", "cumprod_", "cummax", "cummin", "argsort", "msort", "kthvalue", "mode", "median", "nanmedian",
    "glu", "renorm",
)  # fmt: skip
def _along(call: OpCall) -> OpLetters | None:
    """What looks at whole rows along the named dims; the others may be cut."""
    x = call.operands[0]
    if call.name in ("diff", "renorm") or len(call.operands) > 1:
        return None
    named = call["dims"] if call["dims"] is not None else call["dim"]
    if call.name in ("sort", "topk", "argsort") and named is None:
        named = -1
    if call.name == "msort":
        named = 0
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


register_letters(
    "amax", "amin", "aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "logsumexp", "any",
    "all", "prod", "norm", "nanmean", "count_nonzero", "linalg_vector_norm", "linalg_norm",
    "linalg_matrix_norm",
)(_along)  # fmt: skip


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


@register_letters("index")
def _index(call: OpCall) -> OpLetters | None:
    """``x[:, ids]``: dims without an index may be cut, and so may those of the indices."""
    x, found = call.operands[0], list(call["indices"])
    places = [d for d, index in enumerate(found) if index is not None]
    taken = dims_of(call.outputs[0])
    ids = [found[d] for d in places]
    ndim = max((y.ndim for y in ids), default=0)
    together = places == list(range(places[0], places[-1] + 1)) if places else False
    start = places[0] if together else 0  # where the dims of the indices are in the result
    rest = [*taken[:start], *taken[start + ndim :]]
    shape = call.outputs[0][start : start + ndim]
    if len(rest) != x.ndim - len(places) or not ids:
        return None
    kept = iter(rest)
    letters = tuple(WHOLE if d in places else next(kept) for d in range(x.ndim))
    return OpLetters(
        (letters, *(broadcast(y.shape, shape, taken[start : start + ndim]) for y in ids)), (taken,)
    )


@register_letters("prelu")
def _prelu(call: OpCall) -> OpLetters:
    """One slope for all, or one for each channel."""
    x, weight = call.operands
    letters = dims_of(x.shape)
    shared = weight.shape != x.shape[1:2]
    return OpLetters((letters, (WHOLE if shared else letters[1],) * weight.ndim), (letters,))
