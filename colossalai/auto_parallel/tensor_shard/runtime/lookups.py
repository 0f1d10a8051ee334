"""Lookups in a table of which each rank holds some rows."""

from __future__ import annotations

from torch import Tensor

from colossalai.mesh import Axes, Mesh, local_range
from colossalai.tensor.ops.embedding import lookup_rows, outside


def lookup(ids: Tensor, rows: Tensor, size: int, axes: Axes, padding_idx: int | None, mesh: Mesh) -> Tensor:
    """The entries that this rank has, and zeros for the others: a sum over ``axes``, which cut the table."""
    if (wrong := outside(ids, size)) is not None:
        raise IndexError(f"embedding: index {wrong} is not in a table of {size} rows")
    start, _ = local_range(size, axes, mesh)
    return lookup_rows(ids, rows, start, padding_idx)
