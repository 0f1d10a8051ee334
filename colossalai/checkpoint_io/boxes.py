"""Boxes: the rectangles that tensors are cut into, and what two of them have in common.

However a plan cuts a tensor, what a rank holds of it is a few boxes: one for a slice, one for each block of a
fused weight, and at most ``2n - 1`` for a range of the flattened tensor of ``n`` dims (ZeRO, Gemini).  So a
checkpoint stores boxes, and a rank that loads it under another plan takes from each stored box what it has in
common with its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

Shape = tuple[int, ...]


@dataclass(frozen=True, order=True)
class Box:
    """The elements from ``offsets`` on, ``sizes`` many in each dim."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> Shape:
        return tuple(a + n for a, n in zip(self.offsets, self.sizes, strict=True))

    def common(self, other: Box) -> Box | None:
        """The elements that are in both; None if there are none."""
        starts = tuple(map(max, zip(self.offsets, other.offsets, strict=True)))
        ends = tuple(map(min, zip(self.ends, other.ends, strict=True)))
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def holds(self, inner: Box) -> bool:
        """Whether all of ``inner`` is in this box."""
        starts = all(a <= b for a, b in zip(self.offsets, inner.offsets, strict=True))
        return starts and all(a >= b for a, b in zip(self.ends, inner.ends, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds ``outer``."""
        return tuple(
            slice(a - base, a - base + n)
            for a, base, n in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )

    def moved(self, outer: Box, to: Box) -> Box:
        """This part of ``outer``, after that has moved to where ``to`` begins."""
        places = zip(self.offsets, outer.offsets, to.offsets, strict=True)
        return Box(tuple(a - before + after for a, before, after in places), self.sizes)

    def without(self, inner: Box) -> Iterator[Box]:
        """The elements that are not in ``inner``, a part of this box, as boxes: at most two for each dim."""
        offsets, ends = list(self.offsets), list(self.ends)
        for dim in range(len(offsets)):
            for start, end in ((offsets[dim], inner.offsets[dim]), (inner.ends[dim], ends[dim])):
                if start < end:
                    sizes = [e - o for o, e in zip(offsets, ends, strict=True)]
                    yield Box(
                        (*offsets[:dim], start, *offsets[dim + 1 :]),
                        (*sizes[:dim], end - start, *sizes[dim + 1 :]),
                    )
            offsets[dim], ends[dim] = inner.offsets[dim], inner.ends[dim]

    def run_within(self, outer: Box) -> int | None:
        """Return where this box begins in a tensor that holds ``outer``.

        None if its elements are not consecutive there.
        """
        start, stride, is_cut = 0, 1, False
        for a, base, n, size in zip(
            self.offsets[::-1], outer.offsets[::-1], self.sizes[::-1], outer.sizes[::-1], strict=True
        ):
            if is_cut and n != 1:
                return None
            is_cut = is_cut or n != size
            start += (a - base) * stride
            stride *= size
        return start


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def check_cover(shape: Shape, boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not the elements of ``shape``, each exactly once."""
    for box in boxes:
        for dims in (box.offsets, box.sizes):
            if len(dims) != len(shape) or any(type(n) is not int or n < 0 for n in dims):
                raise ValueError(f"{box} is no box of a tensor of shape {shape}")
        if any(end > size for end, size in zip(box.ends, shape, strict=True)):
            raise ValueError(f"{box} is outside the shape {shape}")
    count, total = sum(box.numel for box in boxes), math.prod(shape)
    if count != total:
        raise ValueError(f"its boxes hold {count} elements, and its shape {shape} has {total}")
    if (twice := overlap(boxes)) is not None:
        raise ValueError(f"{twice[0]} and {twice[1]} have elements in common")


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have elements in common, found by a walk along the dim that is cut into most pieces."""
    boxes = [box for box in boxes if box.numel]
    dims = range(len(boxes[0].offsets)) if boxes else ()
    along = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    ordered = sorted(boxes, key=lambda box: 0 if along is None else box.offsets[along])
    for i, box in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if along is not None and other.offsets[along] >= box.ends[along]:
                break
            if box.common(other) is not None:
                return box, other
    return None


def disjoint(held: Mapping[Box, Sequence[int]]) -> dict[Box, list[int]]:
    """The elements that ranks hold as boxes without common elements, each with all ranks that hold it."""
    found: dict[Box, list[int]] = {}
    if overlap(list(held)) is None:
        return {box: list(ranks) for box, ranks in held.items()}
    for box, ranks in held.items():
        new = [box] if box.numel else []
        while new:
            part = new.pop()
            known = next((other for other in found if part.common(other) is not None), None)
            if known is None:
                found[part] = list(ranks)
                continue
            common = part.common(known)
            assert common is not None
            before = found.pop(known)
            found.update((rest, list(before)) for rest in known.without(common))
            found[common] = sorted({*before, *ranks})
            new += part.without(common)
    return found


def boxes_of_ranges(ranges: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Box, Box]]:
    """The boxes of a tensor that for every dim has some (start, length) ranges, one after the other.

    Each comes with its place in the local tensor, in which the ranges lie without gaps.  Empty ones are left
    out.
    """
    per_dim = []
    for dim in ranges:
        place, found = 0, []
        for start, length in dim:
            found.append((start, place, length))
            place += length
        per_dim.append(found)
    pairs = [
        (
            Box(tuple(s for s, _, _ in chosen), tuple(n for _, _, n in chosen)),
            Box(tuple(p for _, p, _ in chosen), tuple(n for _, _, n in chosen)),
        )
        for chosen in product(*per_dim)
    ]
    return [(box, place) for box, place in pairs if box.numel]


def boxes_of_flat(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Cut the elements ``[start, end)`` of a flattened tensor into boxes, each with its place in the range.

    There are at most ``2n - 1``: rest of a row, rest of a matrix, ..., whole matrices, begin of a matrix,
    begin of a row.
    """
    total = math.prod(shape)
    if not 0 <= start <= end <= total:
        raise ValueError(
            f"the range {start} to {end} is not within the {total} elements of shape {tuple(shape)}"
        )
    place = 0
    while start < end:
        box = _longest(tuple(shape), start, end)
        yield box, place
        place += box.numel
        start += box.numel


def _longest(shape: Shape, start: int, end: int) -> Box:
    """Return the largest box that begins at ``start`` and whose elements are consecutive up to ``end``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets, rest = [], start
    for stride in strides:
        index, rest = divmod(rest, stride)
        offsets.append(index)
    for dim, stride in enumerate(strides):  # the first dim, from the left, in which whole steps can be made
        if start % stride == 0 and end - start >= stride:
            count = min((end - start) // stride, shape[dim] - offsets[dim])
            return Box(tuple(offsets), (*(1,) * dim, count, *shape[dim + 1 :]))
    return Box(tuple(offsets), (1,) * len(shape))  # a tensor without dims has one element
