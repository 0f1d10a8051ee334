"""Specs of a tensor among the tp ranks of its process group: whole on each, or cut along one dim.

Both are names for a :class:`colossalai.mesh.Layout` on the axis ``tp``, and ``layout_of`` is the one place
where names become layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from colossalai._numeric import round_up
from colossalai.mesh import Layout
from colossalai.tensor.process_group import TP, ProcessGroup


@dataclass(frozen=True)
class ReplicaSpec:
    """Whole on every tp rank."""


@dataclass(frozen=True)
class ShardSpec:
    """Cut along ``dims[0]`` into ``num_partitions[0]`` equal pieces, one for each tp rank.

    One axis can cut one dim, so both lists have one element.
    """

    dims: Sequence[int]
    num_partitions: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("dims", "num_partitions"):
            value = getattr(self, name)
            if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                raise TypeError(f"ShardSpec takes {name} as a list of one integer, got {value!r}")
            if len(value) != 1 or not isinstance(value[0], int):
                raise ValueError(
                    f"ShardSpec(dims={list(self.dims)}, num_partitions={list(self.num_partitions)}): the tp"
                    f" ranks cut one dim, so {name} is a list of one integer; a tensor that is not cut has a"
                    " ReplicaSpec()"
                )
            object.__setattr__(self, name, tuple(value))


DistSpec = ShardSpec | ReplicaSpec


@lru_cache(maxsize=256)
def cut_along(dim: int | None, ndim: int) -> Layout:
    """The layout of a tensor of ``ndim`` dims that the tp ranks cut along ``dim``, or hold whole."""
    return Layout(tuple((TP,) if d == dim else () for d in range(ndim)))


def layout_of(dist_spec: DistSpec, shape: Sequence[int], pg: ProcessGroup, *, whole: bool) -> Layout:
    """The layout that ``dist_spec`` names for a tensor of ``shape``; ``whole`` says that this is not a
    piece's shape.
    """
    if isinstance(dist_spec, ReplicaSpec):
        return cut_along(None, len(shape))
    if not isinstance(dist_spec, ShardSpec):
        raise TypeError(
            f"a dist spec is a ShardSpec or a ReplicaSpec, got {type(dist_spec).__name__} {dist_spec!r}"
        )
    (dim,), (parts,) = dist_spec.dims, dist_spec.num_partitions
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{dist_spec} names dim {dim} of a tensor of {len(shape)} dims, shape {tuple(shape)}"
        )
    if parts != pg.tp_world_size():
        raise ValueError(
            f"{dist_spec} asks for {parts} pieces, but {pg} cuts a tensor into {pg.tp_world_size()}: write"
            " ShardSpec([dim], [pg.tp_world_size()]), and call set_process_group(pg) first if the tensor"
            " lies on another"
        )
    if whole and shape[dim] % parts:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(shape)} cannot be cut into {parts} equal pieces:"
            f" {shape[dim]} is not a multiple of {parts}; cut another dim, keep the tensor whole, or choose a"
            f" size of {shape[dim] // parts * parts or parts} or {round_up(shape[dim], parts)}"
        )
    return cut_along(dim % len(shape), len(shape))


def spec_of(layout: Layout, pg: ProcessGroup) -> DistSpec:
    """The inverse of ``layout_of``."""
    dim = layout.state(TP)
    return ShardSpec([dim], [pg.tp_world_size()]) if isinstance(dim, int) else ReplicaSpec()
