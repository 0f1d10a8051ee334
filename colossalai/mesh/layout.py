"""``Layout``: where a tensor lies on the mesh.

On each axis a tensor is in exactly one state:

=====  ==============================================================  ===================
state  meaning                                                         state of its gradient
=====  ==============================================================  ===================
S(d)   cut along dim d                                                 S(d)
I      identical, and every rank of the axis does the same with it     I
R      identical, but each rank is about to use it differently         P
P      partial: the true value is the sum over the axis                R
=====  ==============================================================  ===================

From the layout follow the local shape, the slice of a checkpoint, the share of the gradient norm and the
place in the random stream, so none of these is ever written down a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from colossalai._numeric import round_up
from colossalai.mesh.mesh import Axes, Mesh

State = Literal["I", "R", "P"] | int


@dataclass(frozen=True)
class Layout:
    """Placement of one tensor on the mesh.  Axes that are not mentioned are in state I."""

    dims: tuple[Axes, ...]
    """For every dim of the tensor the axes that cut it, major first."""
    partial: frozenset[str] = frozenset()
    """Axes in state P."""
    spread: frozenset[str] = frozenset()
    """Axes in state R."""
    fused: tuple[int, ...] = ()
    """For every dim the number of equal blocks that are cut one by one: (1, 3) for a weight that holds q, k
    and v.
    """
    zigzag: frozenset[str] = frozenset()
    """Axes of n ranks that cut their dim into 2 n chunks, of which rank i holds i and 2 n - 1 - i, one behind
    the other: of causal attention every rank then has the same work.  Such an axis is the first one of its
    dim; the others cut each of the two chunks.
    """

    def __post_init__(self) -> None:
        for axes in (*self.dims, self.partial, self.spread, self.zigzag):
            if isinstance(axes, str):  # a string is a sequence of letters
                raise TypeError(
                    f"axes are given as a tuple or a set of names: write ({axes!r},), not {axes!r}"
                )
        # not self.sharded: the lock of a cached property, in Python below 3.12, is no code for torch.compile
        named = [*(axis for axes in self.dims for axis in axes), *self.partial, *self.spread]
        for axis in named:
            if named.count(axis) > 1:
                raise ValueError(
                    f"axis {axis!r} is mentioned twice in {self}; a tensor has one state on each axis"
                )
        if self.fused and len(self.fused) != len(self.dims):
            raise ValueError(
                f"fused={self.fused} must name one number of blocks for each of {len(self.dims)} dims"
            )
        if any(blocks < 1 for blocks in self.fused):
            raise ValueError(f"fused={self.fused}: a dim that is cut as one has 1 block")
        for axis in self.zigzag:
            dim = next((d for d, axes in enumerate(self.dims) if axes[:1] == (axis,)), None)
            if dim is None or (self.fused and self.fused[dim] > 1):
                raise ValueError(
                    f"zigzag axis {axis!r} must be the first axis of a dim that is not fused, in {self}"
                )

    def state(self, axis: str) -> State:
        """``"I"``, ``"R"``, ``"P"``, or the tensor dim that the axis cuts."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return dim
        return "P" if axis in self.partial else "R" if axis in self.spread else "I"

    def dual(self) -> Layout:
        """The layout of the gradient."""
        return self._dual

    def transposed(self) -> Layout:
        return self._transposed

    # Every step asks for these and looks routes up by layouts, so they are computed once.  (What serial
    # layers read is not cached: torch.compile cannot look into the lock that cached_property has before
    # Python 3.12.)

    @cached_property
    def _dual(self) -> Layout:
        return replace(self, partial=self.spread, spread=self.partial)

    @cached_property
    def _transposed(self) -> Layout:
        return replace(self, dims=self.dims[::-1], fused=self.fused[::-1])

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial, self.spread, self.fused, self.zigzag))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # without what was computed: strings have other hashes in other processes
        return Layout, (self.dims, self.partial, self.spread, self.fused, self.zigzag)

    def whole(self) -> Layout:
        """The same tensor with nothing cut."""
        return replace(self, dims=((),) * len(self.dims), zigzag=frozenset())

    def blocks(self, dim: int) -> int:
        """The number of equal blocks of the dim that are cut one by one."""
        if self.zigzag and self.zigzag.intersection(self.dims[dim]):
            return 2
        return self.fused[dim] if self.fused else 1

    @cached_property
    def sharded(self) -> Axes:
        """Every axis that cuts some dim."""
        return tuple(a for axes in self.dims for a in axes)

    @property
    def rows(self) -> frozenset[str]:
        """The axes that cut any dim but the last."""
        return frozenset(a for axes in self.dims[:-1] for a in axes)

    def __str__(self) -> str:
        cuts = ", ".join(
            "+".join(f"zigzag({a})" if a in self.zigzag else a for a in axes) or "-" for axes in self.dims
        )
        states = "".join(
            f" {s}({','.join(sorted(axes))})" for s, axes in (("P", self.partial), ("R", self.spread)) if axes
        )
        fused = f" fused{self.fused}" if any(n > 1 for n in self.fused) else ""
        return f"[{cuts}]{states}{fused}"


def replicated(ndim: int) -> Layout:
    """The layout of a tensor that every rank holds whole and uses alike."""
    return Layout(((),) * ndim)


def piece(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` when ``length`` is cut into ``parts``; the first pieces take the
    rest.
    """
    base, extra = divmod(length, parts)
    return index * base + min(index, extra), base + (index < extra)


def local_range(size: int, axes: Axes, mesh: Mesh, *, uneven: bool = False) -> tuple[int, int]:
    """Start and length of this rank's piece of a dim of ``size`` cut by ``axes``, major first."""
    parts = mesh.group_size(*axes)
    if size % parts and not uneven:
        raise ValueError(
            f"a dim of size {size} cannot be cut into {parts} equal parts by axes {axes}; choose a multiple"
            f" of {parts} (the nearest are {size // parts * parts or parts} and {round_up(size, parts)})"
        )
    start, length = 0, size
    for axis in axes:
        offset, length = piece(length, mesh.size[axis], mesh.coord[axis])
        start += offset
    return start, length


def local_slices(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, *, uneven: bool = False
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every dim the (start, length) ranges of the whole tensor that this rank holds: one, or one per
    fused block, or the two chunks of a zig-zag.
    """
    _check_rank(shape, layout)
    slices = []
    for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        blocks = layout.blocks(dim)
        if zigzag := bool(layout.zigzag.intersection(axes)):
            check_zigzag(dim, size, mesh.group_size(*axes))
        if size % blocks:
            raise ValueError(f"dim {dim} of size {size} does not hold {blocks} equal fused blocks")
        start, length = local_range(size // blocks, axes, mesh, uneven=uneven)
        starts = [b * (size // blocks) + start for b in range(blocks)]
        if zigzag:  # the second half is dealt in reverse order
            parts, chunk = mesh.size[axes[0]], size // 2 // mesh.size[axes[0]]
            starts[1] += (parts - 1 - 2 * mesh.coord[axes[0]]) * chunk
        slices.append(tuple((begin, length) for begin in starts))
    return tuple(slices)


def check_zigzag(dim: int, size: int, parts: int) -> None:
    """Refuse a size that 2 chunks for each of ``parts`` ranks do not divide: chunks are equally long."""
    if size % (2 * parts):
        raise ValueError(
            f"dim {dim} of size {size} cannot be dealt as two chunks to each of {parts} ranks; pad it to a"
            f" multiple of {2 * parts} (the next is {round_up(size, 2 * parts)})"
        )


def local_shape(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, *, uneven: bool = False
) -> tuple[int, ...]:
    """The shape of this rank's piece of a tensor of ``shape``."""
    return tuple(sum(n for _, n in ranges) for ranges in local_slices(shape, layout, mesh, uneven=uneven))


def shard(full: torch.Tensor, layout: Layout, mesh: Mesh, *, uneven: bool = False) -> torch.Tensor:
    """This rank's piece of ``full``, as a tensor of its own; no communication."""
    local = full
    for dim, ranges in enumerate(local_slices(tuple(full.shape), layout, mesh, uneven=uneven)):
        pieces = [local.narrow(dim, start, length) for start, length in ranges]
        local = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return local.clone(memory_format=torch.contiguous_format)


def _check_rank(shape: tuple[int, ...], layout: Layout) -> None:
    if len(shape) != len(layout.dims):
        raise ValueError(
            f"the layout {layout} describes {len(layout.dims)} dims, the tensor has shape {tuple(shape)}"
        )
