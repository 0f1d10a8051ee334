"""Operations on rows of which each rank has some: lookups in a table, and the mean of a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.mesh import Axes, Mesh, local_range
from colossalai.mesh.collectives import all_reduce
from colossalai.tensor.ops.embedding import lookup_rows, outside


def lookup(ids: Tensor, rows: Tensor, size: int, axes: Axes, padding_idx: int | None, mesh: Mesh) -> Tensor:
    """The entries that this rank has, and zeros for the others: a sum over ``axes``, which cut the table."""
    if (wrong := outside(ids, size)) is not None:
        raise IndexError(f"embedding: index {wrong} is not in a table of {size} rows")
    start, _ = local_range(size, axes, mesh)
    return lookup_rows(ids, rows, start, padding_idx)


def mean_loss(total: Tensor, target: Tensor, ignore_index: int, axes: Axes, mesh: Mesh) -> Tensor:
    """The part that this rank's rows have in the mean over all rows that count; ``total`` is their sum."""
    with torch.no_grad():
        counts = (target != ignore_index).sum().to(total.dtype)
        for axis in axes:
            counts = all_reduce(counts, mesh, axis)
    return total / counts
