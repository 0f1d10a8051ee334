"""``ShardingSpec``: the documented way to say how a tensor lies on a grid of devices, as ``S01R`` or ``RS0``.

``S01`` says that a dim is cut by axis 0 of the grid and each piece by axis 1; ``R`` that it is whole.  A spec
is a name for a :class:`colossalai.mesh.Layout` (``spec.layout``) whose axes are called "0", "1" and so on,
and ``R`` is its state I: the ranks do the same with what is whole.  ``partial`` are axes over which the
tensor is still to be summed.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from colossalai.device import DeviceMesh
from colossalai.mesh import Layout

# The similarity of two specs, by which the documented heuristic chooses: what it takes to undo a cut, to make
# one, and to make one step more.
ALLGATHER_COST = 20
SHARD_COST = 5
STEP_PENALTY = 6
NAN = "nan"
"""Stands in the place of a difference between specs that cannot be compared."""


class ShardingSpecException(ValueError):
    """A sharding spec that makes no sense."""


class ShardingOutOfIndexError(ShardingSpecException):
    """A spec names a dim that the tensor does not have, or an axis that the grid does not have."""


class DuplicatedShardingDimensionError(ShardingSpecException):
    """A spec uses one axis of the grid twice."""


class ShardingNotDivisibleError(ShardingSpecException):
    """The size of a dim is not a multiple of the number of its pieces."""


class _DimSpec:
    """How one dim lies: the axes that cut it, major first; none if it is whole."""

    def __init__(self, shard_list: Sequence[int] = ()) -> None:
        self.shard_list = list(shard_list)

    @property
    def is_replica(self) -> bool:
        return not self.shard_list

    def difference(self, other: _DimSpec) -> int:
        """How much there is to do from here to ``other``: the cuts that they do not share are undone and
        made, one after the other.
        """
        same = 0
        for mine, theirs in zip(self.shard_list, other.shard_list, strict=False):
            if mine != theirs:
                break
            same += 1
        gathers, cuts = len(self.shard_list) - same, len(other.shard_list) - same
        return gathers * ALLGATHER_COST + cuts * SHARD_COST + max(gathers + cuts - 1, 0) * STEP_PENALTY

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return f"S{''.join(map(str, self.shard_list))}" if self.shard_list else "R"

    __repr__ = __str__


Partition = Mapping[int, Sequence[int]]
Notation = str | Sequence["_DimSpec | str"]


class ShardingSpec:
    """How a tensor lies on a grid of devices.

    It has two documented forms: with the grid and the shape of the whole tensor, or with the number of dims
    alone.  Either ``dim_partition_dict`` (for each dim that is cut, its axes) or ``sharding_sequence``
    (``"S01R"``, ``["S01", "R"]``) says how; without both, the tensor is whole.  ``partial`` are the axes over
    which it is still to be summed.
    """

    @overload
    def __init__(
        self,
        device_mesh: DeviceMesh,
        entire_shape: Sequence[int],
        dim_partition_dict: Partition | None = None,
        sharding_sequence: Notation | None = None,
        *,
        partial: Sequence[int] = (),
    ) -> None: ...

    @overload
    def __init__(
        self,
        dim_size: int,
        dim_partition_dict: Partition | None = None,
        sharding_sequence: Notation | None = None,
        *,
        partial: Sequence[int] = (),
    ) -> None: ...

    def __init__(self, *args: Any, **named: Any) -> None:
        bare = "dim_size" in named or bool(args and isinstance(args[0], int))
        given = (_BARE if bare else _ON_MESH).bind(*args, **named).arguments
        self.device_mesh: DeviceMesh | None = given.get("device_mesh")
        self.entire_shape: tuple[int, ...] | None = None if bare else tuple(given["entire_shape"])
        ndim = given["dim_size"] if self.entire_shape is None else len(self.entire_shape)
        partition, sequence = given.get("dim_partition_dict"), given.get("sharding_sequence")
        if partition is not None and sequence is not None:
            raise ShardingSpecException("give dim_partition_dict or sharding_sequence, not both")
        self._dims = _read_dict(partition or {}, ndim) if sequence is None else _read_notation(sequence)
        self.partial: tuple[int, ...] = tuple(sorted(given.get("partial", ())))
        self._check(ndim)

    def _check(self, ndim: int) -> None:
        if len(self._dims) != ndim:
            raise ShardingOutOfIndexError(f"{self} describes {len(self._dims)} dims, the tensor has {ndim}")
        used = [axis for axes in (*self._dims, self.partial) for axis in axes]
        for axis in used:
            if used.count(axis) > 1:
                raise DuplicatedShardingDimensionError(f"{self} uses axis {axis} of the grid twice")
        if self.device_mesh is None or self.entire_shape is None:
            return
        shape = tuple(self.device_mesh.shape)
        for axis in used:
            if not 0 <= axis < len(shape):
                raise ShardingOutOfIndexError(f"{self} uses axis {axis}; the grid of shape {shape} has none")
        for dim, (size, axes) in enumerate(zip(self.entire_shape, self._dims, strict=True)):
            if size % (parts := math.prod(shape[axis] for axis in axes)):
                raise ShardingNotDivisibleError(
                    f"{self}: dim {dim} of size {size} cannot be cut into {parts} equal pieces"
                )

    @property
    def dim_partition_dict(self) -> dict[int, list[int]]:
        """For each dim that is cut, the axes that cut it."""
        return self.convert_shard_sequence_to_dict()

    @property
    def sharding_sequence(self) -> list[_DimSpec]:
        """For each dim how it lies."""
        return self.convert_dict_to_shard_sequence()

    def convert_dict_to_shard_sequence(self) -> list[_DimSpec]:
        """The spec as a list with an entry for each dim."""
        return [_DimSpec(axes) for axes in self._dims]

    def convert_shard_sequence_to_dict(self) -> dict[int, list[int]]:
        """The spec as a dict of the dims that are cut."""
        return {dim: list(axes) for dim, axes in enumerate(self._dims) if axes}

    def sharding_sequence_difference(self, other: ShardingSpec) -> int:
        """How far ``other`` is from this spec, by the constants of the documented heuristic."""
        if len(self._dims) != len(other._dims):
            raise ShardingSpecException(f"{self} and {other} have different numbers of dims")
        both = zip(self.sharding_sequence, other.sharding_sequence, strict=True)
        return sum(mine.difference(theirs) for mine, theirs in both)

    spec_diff = sharding_sequence_difference

    def get_sharded_shape_per_device(self) -> tuple[int, ...]:
        """The shape of the piece of a rank."""
        mesh, shape = self.on_mesh()
        return tuple(
            n // math.prod(mesh.shape[axis] for axis in axes)
            for n, axes in zip(shape, self._dims, strict=True)
        )

    def on_mesh(self) -> tuple[DeviceMesh, tuple[int, ...]]:
        """The grid and the shape of the whole tensor; refuses a spec that has neither."""
        if self.device_mesh is None or self.entire_shape is None:
            raise ShardingSpecException(
                f"{self} has no grid of devices: make it with ShardingSpec(device_mesh, entire_shape, ...)"
            )
        return self.device_mesh, self.entire_shape

    @property
    def layout(self) -> Layout:
        """The same as a layout of :mod:`colossalai.mesh`."""
        dims = tuple(tuple(map(str, axes)) for axes in self._dims)
        return Layout(dims, partial=frozenset(map(str, self.partial)))

    def with_layout(self, layout: Layout) -> ShardingSpec:
        """The spec of the same tensor in another layout."""
        mesh, shape = self.on_mesh()
        dims = {dim: [int(axis) for axis in axes] for dim, axes in enumerate(layout.dims) if axes}
        return ShardingSpec(mesh, shape, dims, partial=[int(axis) for axis in layout.partial])

    def _key(self) -> tuple[Any, ...]:
        return self._dims, self.partial, self.entire_shape, id(self.device_mesh)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        sums = f" P{''.join(map(str, self.partial))}" if self.partial else ""
        return "".join(str(_DimSpec(axes)) for axes in self._dims) + sums

    def __repr__(self) -> str:
        return f"ShardingSpec({self})"


def _parameters(*first: str) -> inspect.Signature:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    optional = [
        inspect.Parameter(n, kinds[0], default=None) for n in ("dim_partition_dict", "sharding_sequence")
    ]
    required = [inspect.Parameter(name, kinds[0]) for name in first]
    return inspect.Signature([*required, *optional, inspect.Parameter("partial", kinds[1], default=())])


_ON_MESH, _BARE = _parameters("device_mesh", "entire_shape"), _parameters("dim_size")


def _read_dict(partition: Partition, ndim: int) -> tuple[tuple[int, ...], ...]:
    for dim in partition:
        if not 0 <= dim < ndim:
            raise ShardingOutOfIndexError(
                f"dim_partition_dict names dim {dim}; the tensor has the dims 0 to {ndim - 1}"
            )
        axes = partition[dim]
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            raise ShardingSpecException(
                f"dim_partition_dict has for each dim a list of the axes that cut it, got {axes!r} for dim"
                f" {dim}; write {{{dim}: [{axes}]}}"
            )
    return tuple(tuple(partition.get(dim, ())) for dim in range(ndim))


def _read_notation(sequence: Notation) -> tuple[tuple[int, ...], ...]:
    text = sequence if isinstance(sequence, str) else "".join(map(str, sequence))
    if not re.fullmatch(r"(R|S\d+)*", text):
        raise ShardingSpecException(
            f"sharding_sequence {text!r} is not a sequence of R and S with axes, as in S01R or RS0"
        )
    return tuple(tuple(map(int, digits)) for digits in re.findall(r"[RS](\d*)", text))
