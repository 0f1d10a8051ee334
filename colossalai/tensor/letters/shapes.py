"""The letters of functions that arrange elements: views, permutations, pieces, joints."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from colossalai.tensor.letters.pointwise import dims_of
from colossalai.tensor.letters.table import WHOLE, Letters, OpCall, OpLetters, Shape, register_letters

_VIEWS = (
    "view",
    "reshape",
    "_reshape_alias",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "ravel",
)


@register_letters(*_VIEWS, "view_as", "reshape_as")
def _view(call: OpCall) -> OpLetters | None:
    """Neighbouring dims are split or joined: the first of each group is cut before and after.

    Where a dim is split into three whose first is small (3, of q, k and v), the second may be cut: the joined
    dim is then cut in each of so many blocks.
    """
    source, target = call.operands[0].shape, call.outputs[0]
    if 0 in source:
        return None
    if call["dtype"] is not None:  # the same memory as numbers of another kind
        letters = dims_of(source)
        return OpLetters((letters,), (letters,)) if source == target else None
    before, after = [WHOLE] * len(source), [WHOLE] * len(target)
    blocks: dict[tuple[int, int], int] = {}
    for number, (left, right) in enumerate(equal_products(source, target)):
        left, right = [d for d in left if source[d] > 1], [d for d in right if target[d] > 1]
        if not left or not right:
            continue
        before[left[0]] = after[right[0]] = f"d{number}"
        if len(left) == 1 and len(right) > 2 and target[right[0]] <= 3:
            after[right[0]], after[right[1]] = WHOLE, f"d{number}"
            blocks[0, left[0]] = target[right[0]]
    like: list[Letters] = [tuple(after)] * (len(call.operands) - 1)  # view_as
    return OpLetters((tuple(before), *like), (tuple(after),), blocks, sized=True)


def equal_products(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims of both shapes that have as many elements as each other."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left, right = [i] if i < len(source) else [], [j] if j < len(target) else []
        i, j = i + len(left), j + len(right)
        while prod(source[d] for d in left) != prod(target[d] for d in right):
            if prod(source[d] for d in left) < prod(target[d] for d in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


@register_letters(
    "transpose", "swapaxes", "swapdims", "permute", "t", "movedim", "moveaxis", "numpy_T", "mT", "mH",
    "matrix_H", "adjoint", "transpose_",
)  # fmt: skip
def _permute(call: OpCall) -> OpLetters | None:
    shape, letters = call.operands[0].shape, dims_of(call.operands[0].shape)
    order = _order(call, len(shape))
    return None if order is None else OpLetters((letters,), (tuple(letters[d] for d in order),))


def _order(call: OpCall, ndim: int) -> list[int] | None:
    order = list(range(ndim))
    if call.name == "permute":
        return [int(d) % ndim for d in call["dims"]]
    if call.name in ("t", "numpy_T"):
        return order[::-1]
    if call.name in ("movedim", "moveaxis"):
        taken, to = ([d % ndim for d in _listed(call[name])] for name in ("source", "destination"))
        left = iter(d for d in order if d not in taken)
        return [taken[to.index(d)] if d in to else next(left) for d in order]
    names = {"swapaxes": ("axis0", "axis1"), "transpose": ("dim0", "dim1")}
    first, second = names.get(call.name.replace("dims", "axes").rstrip("_"), ("dim0", "dim1"))
    pair = (call[first], call[second]) if call[first] is not None else (-2, -1)
    a, b = (int(d) % ndim for d in pair)
    order[a], order[b] = order[b], order[a]
    return order


def _listed(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


@register_letters("expand", "expand_as", "broadcast_to")
def _expand(call: OpCall) -> OpLetters:
    out, x = call.outputs[0], call.operands[0].shape
    letters, skipped = dims_of(out), len(out) - len(x)
    before = tuple(
        name if n == out[skipped + d] else WHOLE
        for d, (n, name) in enumerate(zip(x, letters[skipped:], strict=True))
    )
    return OpLetters((before, *((letters,) * (len(call.operands) - 1))), (letters,), sized=True)


def _along(call: OpCall, dims: Sequence[int]) -> OpLetters:
    """Where pieces are taken along ``dims``, which therefore are whole; the other dims may be cut."""
    x = call.operands[0]
    gone = {d % x.ndim for d in dims}
    letters = tuple(WHOLE if d in gone else name for d, name in enumerate(dims_of(x.shape)))
    outputs = []
    for shape in call.outputs:
        same = len(shape) == x.ndim
        outputs.append(letters if same else tuple(name for d, name in enumerate(letters) if d not in gone))
    return OpLetters((letters,), tuple(outputs))


@register_letters("slice", "select", "narrow", "unbind", "glu", "repeat_interleave", "unfold")
def _pieces(call: OpCall) -> OpLetters | None:
    x = call.operands[0]
    dim = call["dim"] if call["dim"] is not None else call["dimension"] if call.name == "unfold" else 0
    if len(call.operands) > 1 or call.name == "unfold" or call["repeats"] is not None:
        return None
    if call.name == "slice" and call.outputs[0] == x.shape:
        return OpLetters((dims_of(x.shape),), (dims_of(x.shape),))
    return _along(call, [int(dim)])


@register_letters("split", "chunk", "split_with_sizes", "tensor_split")
def _split(call: OpCall) -> OpLetters:
    """Equal pieces of a dim: it may be cut in each piece."""
    x = call.operands[0]
    dim = int(call["dim"] or 0) % x.ndim
    found = _along(call, [dim])
    places = call["indices"] is not None or call["tensor_indices_or_sections"] is not None
    if places or len({shape[dim] for shape in call.outputs}) > 1:
        return found
    letters = tuple("piece" if d == dim else name for d, name in enumerate(found.operands[0]))
    return OpLetters((letters,), (letters,) * len(call.outputs), {(0, dim): len(call.outputs)})


@register_letters("cat", "concat", "concatenate", "hstack", "vstack")
def _cat(call: OpCall) -> OpLetters | None:
    ndim = len(call.outputs[0])
    if any(x.ndim != ndim for x in call.operands):
        return None
    dim = min(1, ndim - 1) if call.name == "hstack" else int(call["dim"] or 0) % ndim
    letters = tuple(WHOLE if d == dim else name for d, name in enumerate(dims_of(call.outputs[0])))
    return OpLetters((letters,) * len(call.operands), (letters,))


@register_letters("stack")
def _stack(call: OpCall) -> OpLetters:
    out = call.outputs[0]
    dim = int(call["dim"] or 0) % len(out)
    letters = tuple(WHOLE if d == dim else name for d, name in enumerate(dims_of(out)))
    taken = tuple(name for d, name in enumerate(letters) if d != dim)
    return OpLetters((taken,) * len(call.operands), (letters,))


@register_letters("pad", "constant_pad_nd")
def _pad(call: OpCall) -> OpLetters | None:
    if call["mode"] not in (None, "constant"):
        return None
    x, pads = call.operands[0], list(call["pad"])
    padded = {x.ndim - 1 - i // 2 for i, n in enumerate(pads) if n}
    letters = tuple(WHOLE if d in padded else name for d, name in enumerate(dims_of(x.shape)))
    return OpLetters((letters,), (letters,))


def _channels(call: OpCall) -> OpLetters | None:
    """Functions of each channel of each image by itself."""
    x = call.operands[0]
    if any(len(shape) != x.ndim for shape in call.outputs) or len(call.operands) > 1:
        return None
    space = int(_SPACE[call.name])
    letters = tuple(name if d < x.ndim - space else WHOLE for d, name in enumerate(dims_of(x.shape)))
    return OpLetters((letters,), (letters,) * len(call.outputs))


_SPACE: dict[str, Any] = {
    f"{kind}{n}d{suffix}": n
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for n in (1, 2, 3)
    for suffix in ("", "_with_indices")
}
_SPACE |= {
    f"upsample_{kind}{n}d": n
    for kind, n in (
        ("nearest", 1),
        ("nearest", 2),
        ("nearest", 3),
        ("bilinear", 2),
        ("bicubic", 2),
        ("linear", 1),
        ("trilinear", 3),
    )
}
register_letters(*_SPACE)(_channels)
