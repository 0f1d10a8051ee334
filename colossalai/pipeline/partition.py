"""Divides a sequence of layers among pipeline stages.

A model of ``n`` layers becomes ``pipeline_parallel_size * num_chunks`` parts, each a range of neighbouring
layers.  Part ``i`` is virtual stage ``i`` of a ``Placement``: with several chunks, a batch passes every rank
several times, and ``shape`` says on which way (left out, on that of the schedule in the config).  The answers
are ``parts[rank]``, a list of ``(start, end)`` per chunk, without ``end``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from colossalai.pipeline.stage import Placement, Shape, launched_shape
from colossalai.utils.partition import balanced_cuts

SPLIT_NODE = "SPLIT_NODE"

Range = tuple[int, int]
StageRanges = list[list[Range]]


def partition_uniform(
    num_items: int, pipeline_parallel_size: int, num_chunks: int = 1, *, shape: Shape | None = None
) -> StageRanges:
    """Ranges of layers with equally many layers; the remainder is spread evenly."""
    count = _count(num_items, pipeline_parallel_size, num_chunks)
    return _dealt([num_items * i // count for i in range(count + 1)], pipeline_parallel_size, shape)


def partition_balanced(
    weights: Sequence[float],
    pipeline_parallel_size: int,
    num_chunks: int = 1,
    *,
    shape: Shape | None = None,
) -> StageRanges:
    """Ranges of layers whose heaviest is as light as possible, and among those the most even ones (by the sum
    of squares).

    ``weights`` are what a layer costs: its parameters, or a cost of ``colossalai.pipeline.cost``.
    """
    listed = list(weights) if isinstance(weights, Iterable) and not isinstance(weights, str) else [None]
    if not all(isinstance(w, Real) and w >= 0 for w in listed):  # also false for nan
        raise ValueError(f"the weights of layers must be numbers of at least 0, got {weights!r}")
    count = _count(len(listed), pipeline_parallel_size, num_chunks)
    return _dealt(balanced_cuts(listed, count), pipeline_parallel_size, shape)


def customized_partition(
    exec_seq: Sequence[Any],
    pipeline_parallel_size: int | None = None,
    num_chunks: int = 1,
    *,
    shape: Shape | None = None,
) -> StageRanges:
    """Ranges of layers that end where ``exec_seq`` has a ``"SPLIT_NODE"``; its other strings are the layers.

    Without a size, each part is a rank.
    """
    if not isinstance(exec_seq, Iterable) or isinstance(exec_seq, str):
        raise ValueError(
            f"exec_seq must be a list of the names of layers, with {SPLIT_NODE!r} between stages, got"
            f" {exec_seq!r}"
        )
    bounds = [0]
    for item in exec_seq:
        if item == SPLIT_NODE:
            bounds.append(bounds[-1])
        elif isinstance(item, str):
            bounds[-1] += 1
    bounds = [0, *bounds]
    found = len(bounds) - 1
    size = found if pipeline_parallel_size is None else pipeline_parallel_size
    count = _count(bounds[-1], size, num_chunks)
    if found != count:
        raise ValueError(
            f"exec_seq has {found - 1} {SPLIT_NODE!r}, which make {found} parts, but"
            f" {_plan(size, num_chunks)} need {count}"
        )
    for i in range(count):
        if bounds[i] == bounds[i + 1]:
            raise ValueError(
                f"part {i} of exec_seq has no layer; put at least one between two {SPLIT_NODE!r} and at both"
                " ends"
            )
    return _dealt(bounds, size, shape)


def _count(items: int, stages: int, chunks: int) -> int:
    for what, number in (("layers", items), ("stages", stages), ("chunks", chunks)):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise ValueError(
                f"a partition needs the number of {what} as a whole number of at least 1, got {number!r}"
            )
    if items < stages * chunks:
        raise ValueError(
            f"the model has {items} layers, but {_plan(stages, chunks)} need at least {stages * chunks}; use"
            " fewer stages or chunks, or cut the model into more layers"
        )
    return stages * chunks


def _plan(stages: int, chunks: int) -> str:
    return f"{stages} pipeline stages with {chunks} chunk{'s' if chunks > 1 else ''} each"


def _dealt(bounds: Sequence[int], ranks: int, shape: Shape | None) -> StageRanges:
    """The ranges between ``bounds``, dealt to the ranks."""
    ranges = list(pairwise(bounds))
    place = Placement(ranks, len(ranges) // ranks, launched_shape() if shape is None else shape)
    return [[ranges[place.stage(rank, chunk)] for chunk in range(place.chunks)] for rank in range(ranks)]
