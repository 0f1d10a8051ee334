"""Lookups in a table of which each rank holds some rows, and losses of rows of which each rank has some."""

from __future__ import annotations

import torch
from torch import Tensor

from colossalai.mesh import Axes, Mesh, local_range
from colossalai.mesh.collectives import all_reduce

_lookup = torch.nn.functional.embedding


def lookup(
    ids: Tensor,
    rows: Tensor,
    size: int,
    axes: Axes,
    padding_idx: int | None,
    mesh: Mesh,
    *,
    sparse: bool = False,
) -> Tensor:
    """The entries that this rank has, and zeros for the others: a sum over ``axes``, which cut the table."""
    if (wrong := outside(ids, size)) is not None:
        raise IndexError(f"embedding: index {wrong} is not in a table of {size} rows")
    start, _ = local_range(size, axes, mesh)
    return lookup_rows(ids, rows, start, padding_idx, sparse=sparse)


def lookup_rows(
    ids: Tensor, rows: Tensor, start: int, padding_idx: int | None = None, *, sparse: bool = False
) -> Tensor:
    """The entries of ``ids`` that are among ``rows``, which begin at row ``start`` of the table, and zeros
    for the others.
    """
    length, index = rows.size(0), ids - start
    inside = (index >= 0) & (index < length)
    if padding_idx is not None:
        padding_idx = padding_idx - start if start <= padding_idx < start + length else None
    found = _lookup(index.clamp(0, length - 1), rows, padding_idx, sparse=sparse)
    return found * inside.unsqueeze(-1)


def outside(index: Tensor, size: int) -> int | None:
    """An index that is not from 0 to ``size - 1``: no rank would have it.

    Only on the CPU, where torch looks too: on a GPU, looking means waiting for it.
    """
    if index.device.type != "cpu":
        return None
    wrong = index[(index < 0) | (index >= size)]
    return int(wrong[0]) if len(wrong) else None


def row_loss(total: Tensor, target: Tensor, ignore_index: int, axes: Axes, mesh: Mesh) -> Tensor:
    """The part that this rank's rows have in the mean over all rows that count; ``total`` is their sum."""
    with torch.no_grad():
        counts = (target != ignore_index).sum().to(total.dtype)
        for axis in axes:
            counts = all_reduce(counts, mesh, axis)
    return total / counts
