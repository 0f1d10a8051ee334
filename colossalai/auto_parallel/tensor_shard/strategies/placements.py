"""``placements``: every way to cut an operation over the axes of a mesh, from its letters.

Each axis takes one letter, or none: then all its ranks do the same.  Where the letter is, follows the layout
of every operand and result (see :mod:`colossalai.tensor.letters`).  A result that is partial is summed before
it is handed on: to all ranks of the axis, or so that each keeps a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, product
from math import prod

from colossalai.mesh import Layout
from colossalai.mesh.mesh import Axes
from colossalai.tensor.letters import WHOLE, OpCall, OpLetters

Cut = dict[str, Axes]
"""For each letter that is cut, its axes, major first."""


@dataclass(frozen=True)
class CutOperation:
    """One way to cut an operation: layouts as in ``NodePlan``, and the axes that share its work."""

    name: str
    inputs: tuple[Layout, ...]
    computed: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    working: Axes = ()

    @cached_property
    def resting(self) -> tuple[Layout, ...]:
        """The inputs as they lie before they are used differently: without state R."""
        return tuple(at_rest(layout) for layout in self.inputs)

    @property
    def cuts(self) -> bool:
        """Whether any tensor is cut."""
        return any(layout.sharded for layout in (*self.inputs, *self.outputs))


def at_rest(layout: Layout) -> Layout:
    """The same without state R."""
    return Layout(layout.dims, layout.partial, fused=layout.fused) if layout.spread else layout


def resting_layouts(
    uses: Iterable[Layout], shape: Sequence[int], axes: Mapping[str, int], *, further: bool
) -> list[Layout]:
    """Where a parameter of ``shape`` that is used in these layouts may rest: as it is used, or, if
    ``further``, also cut over more axes, so that it is gathered for its use.
    """
    found = dict.fromkeys(map(at_rest, uses))
    for layout in list(found) if further else ():
        left = [axis for axis, size in axes.items() if size > 1 and axis not in layout.sharded]
        for chosen in product((False, True), repeat=len(left)):
            cut: Layout | None = layout
            for axis in compress(left, chosen):
                cut = cut and _cut_further(cut, axis, shape, axes)
            if cut is not None:
                found.setdefault(cut)
    # first, among those that cost the same: pieces of the first dim, which are gathered without a copy
    return sorted(found, key=lambda layout: [-len(axes) for axes in layout.dims])


def _cut_further(layout: Layout, axis: str, shape: Sequence[int], axes: Mapping[str, int]) -> Layout | None:
    """``layout`` cut over one more axis: along a dim that is whole if there is one; None if none divides."""
    for d in sorted(range(len(shape)), key=lambda d: len(layout.dims[d])):
        over = (*layout.dims[d], axis)
        if shape[d] % (layout.blocks(d) * prod(axes[a] for a in over)) == 0:
            return replace(layout, dims=(*layout.dims[:d], over, *layout.dims[d + 1 :]))
    return None


def whole_placement(call: OpCall) -> CutOperation:
    """Every rank does all of it."""
    inputs = tuple(Layout(((),) * x.ndim) for x in call.operands)
    outputs = tuple(Layout(((),) * len(shape)) for shape in call.outputs)
    names = [layout_name(layout) for layout in (*outputs[:1], *inputs)]
    return CutOperation(
        f"{names[0] if outputs else 'R'} = {' X '.join(names[1:]) or 'R'}", inputs, outputs, outputs
    )


def layout_name(layout: Layout) -> str:
    """The documented notation (``S01R``), with the axes over which it is used differently."""
    name = "".join(f"S{''.join(axes)}" if axes else "R" for axes in layout.dims) or "R"
    spread = "".join(sorted(layout.spread))
    return f"{name} over {spread}" if spread else name


def placements(
    call: OpCall,
    letters: OpLetters | None,
    axes: Mapping[str, int],
    learns: Sequence[bool],
    blocks: Mapping[str, Sequence[int]] | None = None,
) -> list[CutOperation]:
    """All placements of a call on ``axes``, the one that cuts nothing first.

    Args:
        learns: for each operand, whether it has a gradient, so that it matters whether ranks use it alike.
        blocks: for letters whose dims hold several blocks that are cut one by one, the numbers of blocks to
            look at; 1 by default.
    """
    if letters is None:
        return [whole_placement(call)]
    found: dict[tuple[object, ...], CutOperation] = {}
    for cut in _cuts(letters.letters, axes):
        choices = [(blocks or {}).get(letter, (1,)) for letter in cut]
        for numbers in product(*choices):
            one = _Placed(call, letters, axes, learns, cut, dict(zip(cut, numbers, strict=True)))
            for placement in one.placements():
                key = (placement.inputs, placement.computed, placement.outputs)
                found.setdefault(key, placement)
    return _named_apart(list(found.values()))


def share_placements(found: Sequence[CutOperation], axes: Mapping[str, int]) -> list[CutOperation]:
    """Those of an identity, which may also begin what ranks do differently: other axes in state R."""
    result = []
    for placement in found:
        left = [a for a, size in axes.items() if size > 1 and a not in placement.inputs[0].sharded]
        for chosen in product((False, True), repeat=len(left)):
            over = frozenset(a for a, taken in zip(left, chosen, strict=True) if taken)
            layout = replace(placement.inputs[0], spread=over)
            name = f"{layout_name(layout)} = {layout_name(layout)}"
            result.append(CutOperation(name, (layout,), (layout,), (layout,), placement.working))
    return result


def _cuts(letters: Sequence[str], axes: Mapping[str, int]) -> Iterator[Cut]:
    """Every choice of a letter, or none, for each axis."""
    names = [axis for axis, size in axes.items() if size > 1]
    for chosen in product((None, *letters), repeat=len(names)):
        cut: Cut = {}
        for axis, letter in zip(names, chosen, strict=True):
            if letter is not None:
                cut[letter] = (*cut.get(letter, ()), axis)
        yield cut


def _named_apart(found: list[CutOperation]) -> list[CutOperation]:
    """Placements of one name differ in tensors that names leave out; they are numbered."""
    seen: dict[str, int] = {}
    result = []
    for placement in found:
        number = seen[placement.name] = seen.get(placement.name, 0) + 1
        name = placement.name if number == 1 else f"{placement.name} ({number})"
        result.append(
            CutOperation(name, placement.inputs, placement.computed, placement.outputs, placement.working)
        )
    return result


@dataclass(frozen=True)
class _Placed:
    """A call whose letters are cut over axes."""

    call: OpCall
    letters: OpLetters
    axes: Mapping[str, int]
    learns: Sequence[bool]
    cut: Cut
    blocks: Mapping[str, int]

    def placements(self) -> Iterator[CutOperation]:
        if not self._divides():
            return
        count = len(self.call.operands)
        outputs = [self._layout(number + count) for number in range(len(self.call.outputs))]
        summed = [a for letter in sorted(self.letters.summed) for a in self.cut.get(letter, ())]
        computed = tuple(Layout(o.dims, frozenset(summed), fused=o.fused) for o in outputs)
        for handed in self._handed_on(outputs, sorted(summed)):
            inputs = tuple(self._input(number, handed[0] if handed else None) for number in range(count))
            name = self._name(inputs, handed)
            working = tuple(a for axes in self.cut.values() for a in axes)
            yield CutOperation(name, inputs, computed, handed, working)

    def _divides(self) -> bool:
        shapes = [*(x.shape for x in self.call.operands), *self.call.outputs]
        return all(
            shapes[number][dim] % (self._blocks(number, dim, letter) * self._parts(axes)) == 0
            for letter, axes in self.cut.items()
            for number, dim in self.letters.places(letter)
        )

    def _parts(self, axes: Axes) -> int:
        return prod(self.axes[axis] for axis in axes)

    def _blocks(self, number: int, dim: int, letter: str) -> int:
        return self.blocks.get(letter, 1) * self.letters.blocks.get((number, dim), 1)

    def _layout(self, number: int) -> Layout:
        tensor = self.letters.tensors[number]
        dims = tuple(self.cut.get(letter, ()) for letter in tensor)
        fused = tuple(
            self._blocks(number, dim, letter) if dims[dim] else 1 for dim, letter in enumerate(tensor)
        )
        return Layout(dims, fused=fused if any(n > 1 for n in fused) else ())

    def _input(self, number: int, handed: Layout | None) -> Layout:
        layout = self._layout(number)
        if number in self.letters.bias and handed is not None:
            return self._bias(number, handed)
        if not self.learns[number]:
            return layout
        lacking = {a for axes in self.cut.values() for a in axes} - {*layout.sharded}
        return Layout(layout.dims, spread=frozenset(lacking), fused=layout.fused)

    def _bias(self, number: int, handed: Layout) -> Layout:
        """What is added after the sum lies as the result, and is used differently over its other cuts."""
        result = self.letters.outputs[0]
        dims = tuple(
            handed.dims[result.index(letter)] if letter in result else ()
            for letter in self.letters.operands[number]
        )
        cut = {a for axes in dims for a in axes}
        spread = frozenset(handed.sharded) - cut if self.learns[number] else frozenset()
        fused = tuple(
            handed.blocks(result.index(letter)) if letter in result and axes else 1
            for letter, axes in zip(self.letters.operands[number], dims, strict=True)
        )
        return Layout(dims, spread=spread, fused=fused if any(n > 1 for n in fused) else ())

    def _handed_on(self, outputs: list[Layout], summed: Sequence[str]) -> Iterator[tuple[Layout, ...]]:
        """Every layout in which the sums may be handed on: whole, or cut along a dim of the result."""
        if not summed:
            yield tuple(outputs)
            return
        shape, letters = self.call.outputs[0], self.letters.outputs[0]
        places: list[int | None] = [None]
        if len(outputs) == 1:
            places += [
                d for d, letter in enumerate(letters) if letter != WHOLE and letter not in self.letters.whole
            ]
        for chosen in product(places, repeat=len(summed)):
            dims = [list(axes) for axes in outputs[0].dims]
            for axis, dim in zip(summed, chosen, strict=True):
                if dim is not None:
                    dims[dim].append(axis)
            first = Layout(tuple(map(tuple, dims)), fused=outputs[0].fused)
            if all(
                axes == sorted(axes) and n % (first.blocks(d) * self._parts(tuple(axes))) == 0
                for d, (n, axes) in enumerate(zip(shape, dims, strict=True))
            ):
                yield (first, *outputs[1:])

    def _name(self, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> str:
        """Layouts of result and operands, without dims that are never cut; of a weight, common dims first."""
        count = len(inputs)
        shown = [i for i in range(count) if i not in self.letters.bias and any(self.letters.operands[i])]
        parts, before = [], set[str]()
        for i in shown[:3]:
            letters = self.letters.operands[i]
            kept = [d for d, letter in enumerate(letters) if letter]
            kept.sort(key=lambda d: letters[d] not in before)
            before = before or set(letters)
            parts.append(layout_name(Layout(tuple(inputs[i].dims[d] for d in kept))))
        kept = [d for d, letter in enumerate(self.letters.outputs[0]) if letter] if outputs else []
        result = layout_name(Layout(tuple(outputs[0].dims[d] for d in kept))) if outputs else "R"
        blocks = max((n for layout in (*inputs, *outputs) for n in layout.fused), default=1)
        suffix = f" in {blocks} blocks" if blocks > 1 else ""
        return f"{result} = {' X '.join(parts) or 'R'}{suffix}"
