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

    def __post_init__(self) -> None:
        for axes in (*self.dims, self.partial, self.spread):
            if isinstance(axes, str):  # a string is a sequence of letters
                raise TypeError(
                    f"axes are given as a tuple or a set of names: write ({axes!r},), not {axes!r}"
                )
        named = [*self.sharded, *self.partial, *self.spread]
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
        return hash((self.dims, self.partial, self.spread, self.fused))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # without what was computed: strings have other hashes in other processes
        return Layout, (self.dims, self.partial, self.spread, self.fused)

    def whole(self) -> Layout:
        """The same tensor with nothing cut."""
        return replace(self, dims=((),) * len(self.dims))

    def blocks(self, dim: int) -> int:
        return self.fused[dim] if self.fused else 1

    @property
    def sharded(self) -> Axes:
        """Every axis that cuts some dim."""
        return tuple(a for axes in self.dims for a in axes)

    @property
    def rows(self) -> frozenset[str]:
        """The axes that cut any dim but the last."""
        return frozenset(a for axes in self.dims[:-1] for a in axes)

    def __str__(self) -> str:
        cuts = ", ".join("+".join(axes) or "-" for axes in self.dims)
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
    fused block.
    """
    _check_rank(shape, layout)
    slices = []
    for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        blocks = layout.blocks(dim)
        if size % blocks:
            raise ValueError(f"dim {dim} of size {size} does not hold {blocks} equal fused blocks")
        start, length = local_range(size // blocks, axes, mesh, uneven=uneven)
        slices.append(tuple((b * (size // blocks) + start, length) for b in range(blocks)))
    return tuple(slices)


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
