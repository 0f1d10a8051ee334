"""Lookups in a table that is cut along its features or along its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import local_range, reduce
from colossalai.tensor.colo_tensor import ColoTensor, as_whole, cut_dim, on_wholes, whole_result, wrap
from colossalai.tensor.compute_spec import ComputePattern
from colossalai.tensor.distspec import cut_along
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece
from colossalai.tensor.process_group import TP

_lookup = torch.nn.functional.embedding


@colo_op_impl(_lookup)
def _(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    dim = cut_dim(weight)
    if dim is None or not (
        isinstance(weight, ColoTensor) and weight.has_compute_pattern(ComputePattern.TP1D)
    ):
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return on_wholes(_lookup, (input, weight, *options), {})
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError(
            f"an embedding table of shape {tuple(weight.full_shape)} that is cut as {weight.dist_spec} cannot"
            " be used with max_norm or scale_grad_by_freq, which look at whole rows; leave the table whole"
        )
    ids = as_piece(as_whole(input))
    if padding_idx is not None:
        padding_idx %= weight.size_global(0)
    if dim == 0:
        return _by_vocabulary(ids, weight, padding_idx, sparse)
    piece = _lookup(ids, as_piece(weight), padding_idx, sparse=sparse)
    result = wrap(piece, weight.process_group, cut_along(piece.ndim - 1, piece.ndim))
    assert weight.compute_spec is not None
    return whole_result(result, weight.process_group) if weight.compute_spec.output_replicate else result


def _by_vocabulary(ids: Tensor, weight: ColoTensor, padding_idx: int | None, sparse: bool) -> Tensor:
    """Each rank looks up the ids that it has and gives zeros for the others: a sum."""
    mesh, size = weight.process_group.mesh, weight.size_global(0)
    if (wrong := outside(ids, size)) is not None:
        raise IndexError(f"embedding: index {wrong} is not in a table of {size} rows")
    start, _ = local_range(size, (TP,), mesh)
    rows = lookup_rows(ids, as_piece(weight), start, padding_idx, sparse=sparse)
    return whole_result(reduce(rows, TP, mesh), weight.process_group)


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
