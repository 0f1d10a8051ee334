"""What older scripts say about the parameters of a model: how they were cut, or are to be cut.

Models of this package know how they lie.  These descriptions are for parameters that a script has cut itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io.boxes import Box, Shape
from colossalai.interface import user_module
from colossalai.mesh import Layout, Mesh
from colossalai.mesh.layout import piece

TP = "tp"


@dataclass(frozen=True)
class ParamDistMeta:
    """How a parameter lies on one rank.

    ``tp_shard_dims`` are the dims that tensor parallelism cuts, each into so many of ``tp_num_parts``.
    ``zero_numel`` and ``zero_orig_shape`` belong to parameters that are stored as flat parts.
    """

    dp_rank: int
    dp_world_size: int
    tp_rank: int
    tp_world_size: int
    tp_shard_dims: list[int] | None = None
    tp_num_parts: list[int] | None = None
    zero_numel: int | None = None
    zero_orig_shape: list[int] | None = None

    @property
    def used_tp(self) -> bool:
        return bool(self.tp_shard_dims)

    @property
    def used_zero(self) -> bool:
        return self.zero_numel is not None


@dataclass(frozen=True)
class ParamRedistMeta:
    """How a parameter is to lie, on all ranks."""

    dp_world_size: int
    tp_world_size: int
    tp_shard_dims: list[int] | None = None
    tp_num_parts: list[int] | None = None
    zero_start_dp_rank: int | None = None
    zero_offsets: list[int] | None = None

    @property
    def used_tp(self) -> bool:
        return bool(self.tp_shard_dims)

    @property
    def used_zero(self) -> bool:
        return self.zero_start_dp_rank is not None or self.zero_offsets is not None


@dataclass(frozen=True)
class RankRedistMeta:
    """The place of a rank for one parameter."""

    dp_rank: int
    tp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class PipelineRedistMeta:
    """The names of the parameters of one pipeline stage."""

    params: set[str]


@dataclass(frozen=True)
class RedistMeta:
    """A plan: for each parameter how it is to lie, and by its name and the rank, which piece a rank has."""

    rank_meta: dict[str, dict[int, RankRedistMeta]]
    pipeline_meta: list[PipelineRedistMeta] = field(default_factory=list)
    param_meta: dict[str, ParamRedistMeta] = field(default_factory=dict)

    def of_rank(self, rank: int) -> dict[str, ParamDistMeta]:
        """Return how the parameters of ``rank`` lie."""
        found = {}
        for name, meta in self.param_meta.items():
            place = self.rank_meta.get(name, {}).get(rank)
            if place is None or not self._has(name, place.pp_rank):
                continue
            found[name] = ParamDistMeta(
                place.dp_rank,
                meta.dp_world_size,
                place.tp_rank,
                meta.tp_world_size,
                meta.tp_shard_dims,
                meta.tp_num_parts,
                0 if meta.used_zero else None,
            )
        return found

    def _has(self, name: str, stage: int) -> bool:
        return not self.pipeline_meta or name in self.pipeline_meta[stage].params


def cut_of(name: str, meta: ParamDistMeta | ParamRedistMeta) -> tuple[int, int] | None:
    """Return the dim that is cut and the number of pieces; None if the parameter is whole."""
    dims, parts = meta.tp_shard_dims or [], meta.tp_num_parts or []
    if not dims and not parts:
        return None
    if len(dims) != 1 or len(parts) != 1 or parts[0] != meta.tp_world_size:
        raise ValueError(
            f"{name!r} is described with tp_shard_dims={dims}, tp_num_parts={parts} and"
            f" tp_world_size={meta.tp_world_size}; tensor-parallel ranks cut one dim, into as many pieces as"
            " there are of them"
        )
    return dims[0], parts[0]


def boxes_of_plan(name: str, shape: Shape, meta: ParamRedistMeta) -> list[Box]:
    """Return the pieces into which a plan cuts a tensor of ``shape``."""
    cut = cut_of(name, meta)
    if cut is None:
        return [Box((0,) * len(shape), shape)]
    dim, parts = cut
    check_dim(name, shape, dim)
    found = []
    for coord in range(parts):
        start, length = piece(shape[dim], parts, coord)
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, length
        found.append(Box(tuple(offsets), tuple(sizes)))
    return [box for box in found if box.numel]


def check_dim(name: str, shape: Shape, dim: int) -> None:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{name!r} of shape {shape} is described with tp_shard_dims=[{dim}], which it lacks")


class _PlaceOnly(Mesh):
    """The place of this rank among tensor-parallel ranks, to be read; it has no process groups."""

    def __init__(self, size: int, coord: int) -> None:
        self.size, self.coord, self.rank = {TP: size}, {TP: coord}, coord


@dataclass(frozen=True)
class _Owner:
    mesh: Mesh


_ATTRIBUTES = ("placement", "full_shape", "process_group")


@contextmanager
def described(model: nn.Module, metas: Mapping[str, ParamDistMeta] | None) -> Iterator[dict[str, Shape]]:
    """Inside, the plain parameters of ``model`` say of themselves what ``metas`` says of them.

    Parameters that know how they lie must agree with ``metas``.  It gives the shapes of the pieces that it
    describes, for ``check_even``.
    """
    params: dict[str, Any] = dict(user_module(model).named_parameters())
    marked: dict[str, Any] = {}
    try:
        for name, meta in (metas or {}).items():
            if name not in params:
                raise ValueError(
                    f"a parameter {name!r} is described, which the model does not have; it has"
                    f" {', '.join(list(params)[:6])}{', ...' * (len(params) > 6)}"
                )
            if _describe(name, params[name], meta):
                marked[name] = params[name]
        yield {own: tuple(param.shape) for own, param in marked.items()}
    finally:
        for param in marked.values():
            for attribute in _ATTRIBUTES:
                delattr(param, attribute)


def check_even(told: Sequence[Mapping[str, Shape]]) -> None:
    """Refuse pieces of different shapes, from what ``described`` gives on all ranks."""
    first: dict[str, tuple[int, Shape]] = {}
    for rank, shapes in enumerate(told):
        for name, shape in shapes.items():
            other, expected = first.setdefault(name, (rank, shape))
            if shape != expected:
                raise ValueError(
                    f"the pieces of {name!r} are not alike: {expected} on rank {other} and {shape} on rank"
                    f" {rank}. tp_shard_dims and tp_num_parts describe a dim that is cut evenly, into pieces"
                    " of one size. Pad the parameter to a multiple of the ranks before it is cut, or gather"
                    " it and save it whole, without a description; layers and ColoTensors of this package may"
                    " be cut unevenly and need no description"
                )


def _describe(name: str, param: Any, meta: ParamDistMeta) -> bool:
    if not isinstance(meta, ParamDistMeta):
        raise TypeError(f"{name!r} is described by a ParamDistMeta, got {type(meta).__name__}")
    if meta.used_zero:
        raise ValueError(
            f"{name!r} is described as a flat part (zero_numel), but models under ZeRO and Gemini know their"
            " parts themselves; leave it out of the description"
        )
    cut = cut_of(name, meta)
    if hasattr(param, "placement"):  # it knows how it lies
        pieces, told = math.prod(param.full_shape) // max(param.numel(), 1), 1 if cut is None else cut[1]
        if pieces != told:
            raise ValueError(
                f"{name!r} lies in {pieces} pieces, but is described as lying in {told}; leave it out of the"
                " description"
            )
    if hasattr(param, "placement") or cut is None:
        return False
    dim, parts = cut
    check_dim(name, tuple(param.shape), dim)
    dim %= param.ndim
    if not 0 <= meta.tp_rank < parts:
        raise ValueError(f"{name!r} is described with tp_rank={meta.tp_rank} of {parts} ranks")
    shape = list(param.shape)
    shape[dim] *= parts
    param.placement = Layout(tuple((TP,) if d == dim else () for d in range(param.ndim)))
    param.full_shape = torch.Size(shape)
    param.process_group = _Owner(_PlaceOnly(parts, meta.tp_rank))
    return True
