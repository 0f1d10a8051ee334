"""The search for a chunk size: large enough for fast copies, small enough to come and go, with little waste.

Parameters are packed in order; a parameter that is larger than a chunk gets a chunk of its own.  The search
computes the packing for every size in a range, and takes the size that wastes the fewest elements, the
largest of equals.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from colossalai.mesh import Mesh
from colossalai.mesh.rows import averaging_axes, row_axes
from colossalai.tensor import ColoTensor
from colossalai.utils.parallel import launched_mesh
from colossalai.zero.gemini.chunk import ALIGN, aligned, padded

MB = 1024**2
HIDDEN = 1024  # the interval of the search, in elements, where the width of the model is not given


@dataclass(frozen=True)
class Packing:
    """Parameters by number, chunk by chunk, and how many elements are wasted."""

    size: int
    chunks: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    wasted: int

    def report(self, total: int) -> str:
        share = self.wasted / max(total + self.wasted, 1)
        return (
            f"{len(self.chunks)} chunks of {self.size:,} elements hold {total:,} elements of parameters;"
            f" {self.wasted:,} ({share:.2%}) are wasted"
        )


def pack(numels: Sequence[int], size: int, ranks: int) -> Packing:
    """Pack parameters in order into chunks of ``size``, and larger ones into chunks of their own."""
    size = padded(size, ranks)
    chunks: list[list[int]] = []
    used: list[int] = []
    sizes: list[int] = []
    current: int | None = None
    for i, numel in enumerate(numels):
        if numel > size:
            chunks.append([i])
            used.append(numel)
            sizes.append(padded(numel, ranks))
            continue
        if current is None or aligned(used[current]) + numel > size:
            current = len(chunks)
            chunks.append([])
            used.append(0)
            sizes.append(size)
        chunks[current].append(i)
        used[current] = aligned(used[current]) + numel
    if len(chunks) == 1:  # a small model: one chunk of just its size
        sizes[0] = padded(used[0], ranks)
    return Packing(size, tuple(map(tuple, chunks)), tuple(sizes), sum(sizes) - sum(numels))


def search(
    numels: Sequence[int], smallest: int, span: int, interval: int, ranks: int, *, filter_large: bool = True
) -> Packing:
    """Return the packing with the least waste among sizes from ``smallest`` to ``smallest + span``.

    With ``filter_large`` the few parameters that are far larger than the others (embeddings) get chunks of
    their own and do not influence the size of the others.
    """
    ordinary = _ordinary(numels) if filter_large else list(numels)
    largest = max(ordinary, default=1)
    start = max(smallest, aligned(largest) if largest <= smallest + span else smallest)
    candidates = range(start, max(start, smallest + span) + 1, max(interval, ALIGN))
    waste = _Waste(ordinary, ranks)
    return pack(numels, min(candidates, key=lambda size: (waste.of(size), -padded(size, ranks))), ranks)


class _Waste:
    """What ``pack`` wastes, without packing: the search tries thousands of sizes."""

    def __init__(self, numels: Sequence[int], ranks: int) -> None:
        self._numels, self._ranks, self._limits = numels, ranks, sorted(set(numels))
        self._places: dict[int, tuple[list[int], list[int], int]] = {}

    def of(self, size: int) -> int:
        """Count the elements that chunks of ``size`` waste."""
        size = padded(size, self._ranks)
        fitting = bisect_right(self._limits, size)
        if fitting not in self._places:
            self._places[fitting] = self._place(fitting)
        starts, ends, own = self._places[fitting]
        chunks = first = 0
        while first < len(ends):
            first, chunks = bisect_right(ends, starts[first] + size, first), chunks + 1
        if chunks == 1 and len(ends) == len(self._numels):
            size = padded(ends[-1], self._ranks)
        return chunks * size + own - sum(self._numels)

    def _place(self, fitting: int) -> tuple[list[int], list[int], int]:
        """Where each parameter that fits into a chunk begins and ends, were they all in one; the sum of the
        chunks of the others.
        """
        limit = self._limits[fitting - 1] if fitting else -1
        small = [n for n in self._numels if n <= limit]
        starts = list(accumulate(map(aligned, small), initial=0))[: len(small)]
        ends = [start + n for start, n in zip(starts, small, strict=True)]
        return starts, ends, sum(padded(n, self._ranks) for n in self._numels if n > limit)


def _ordinary(numels: Sequence[int]) -> list[int]:
    """Drop the numbers that are more than three standard deviations above the mean."""
    if len(numels) < 2:
        return list(numels)
    values = torch.tensor(numels, dtype=torch.float64)
    limit = values.mean() + 3 * values.std()
    return [n for n in numels if n <= limit]


def model_mesh(model: nn.Module) -> Mesh | None:
    """Return the mesh of a model: that of its ColoParameters, or of the launched job."""
    meshes = {
        id(m): m for m in (p.process_group.mesh for p in model.parameters() if isinstance(p, ColoTensor))
    }
    if len(meshes) > 1:
        raise ValueError(
            f"the ColoParameters of {type(model).__name__} belong to {len(meshes)} process groups; chunks"
            " need one for all"
        )
    return next(iter(meshes.values()), None) or launched_mesh()


def sharing_ranks(model: nn.Module) -> int:
    """Return how many ranks share the chunks of a model: those with the same weights."""
    mesh = model_mesh(model)
    return 1 if mesh is None else mesh.group_size(*row_axes(mesh))


def classify_params_by_dp_degree(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """Return parameters in order, each once, by how many ranks share them: those that average its gradient.

    Of a ColoParameter these are the data-parallel ranks of its own process group.
    """
    launched, found = launched_mesh(), dict[int, list[nn.Parameter]]()
    for param in model.parameters():
        mesh = param.process_group.mesh if isinstance(param, ColoTensor) else launched
        ranks = 1 if mesh is None else mesh.group_size(*averaging_axes(param, mesh))
        found.setdefault(ranks, []).append(param)
    return found


def search_chunk_configuration(
    model: nn.Module,
    search_range_mb: float,
    search_interval_byte: int,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    memstas: Any = None,
    *,
    dtype: torch.dtype = torch.float16,
) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Return chunk sizes in elements by the number of ranks, all elements of parameters, and those wasted.

    ``search_interval_byte`` is the step of the search.  With ``strict_ddp_flag`` chunks stay whole on every
    rank.  ``memstas`` (memory statistics) is an older argument, on which the size does not depend.
    """
    check_search(search_range_mb, search_interval_byte, min_chunk_size_mb)
    config: dict[int, dict[str, Any]] = {}
    total = wasted = 0
    for ranks, params in classify_params_by_dp_degree(model).items():
        numels = [p.numel() for p in params]
        found = search(
            numels,
            round(min_chunk_size_mb * MB) // dtype.itemsize,
            round(search_range_mb * MB) // dtype.itemsize,
            search_interval_byte,
            ranks,
            filter_large=filter_exlarge_params,
        )
        config[ranks] = {"chunk_size": found.size, "keep_gathered": strict_ddp_flag}
        total, wasted = total + sum(numels), wasted + found.wasted
    return config, total, wasted


MANY, GROWTH = 64, 4


def roomier_chunks(model: nn.Module, min_chunk_size_mb: float, dtype: torch.dtype) -> float:
    """Return the smallest chunk size for a model that would fill more than ``MANY`` chunks of it.

    Every chunk costs a copy each way and an update on the host, which are slow to begin: a large model gets
    chunks of up to ``GROWTH`` times the size, so that they are fewer.
    """
    check_search(0, 1, min_chunk_size_mb)
    needed = sum(p.numel() for p in model.parameters()) * dtype.itemsize / MB / MANY
    return min(max(min_chunk_size_mb, needed), GROWTH * min_chunk_size_mb)


def check_configuration(config: Any) -> None:
    """Refuse a configuration without a chunk size."""
    sizes = list(config.values()) if isinstance(config, Mapping) else [{"chunk_size": config}]
    for size in sizes or [None]:
        found = size.get("chunk_size") if isinstance(size, Mapping) else None
        if not isinstance(found, int) or found < 1:
            raise ValueError(
                "a chunk configuration is a chunk size of at least 1 element, or {ranks: {'chunk_size': ...}}"
                f" as search_chunk_configuration returns; got {config!r}"
            )


def check_search(search_range_mb: float, interval: int, min_chunk_size_mb: float) -> None:
    for name, value, least in (
        ("search_range_mb", search_range_mb, 0),
        ("search_interval_byte", interval, 1),
        ("min_chunk_size_mb", min_chunk_size_mb, 0),
    ):
        if not isinstance(value, int | float) or not least <= value < math.inf:
            raise ValueError(
                f"the search for a chunk size needs {name} to be at least {least}, got {value!r}"
            )
