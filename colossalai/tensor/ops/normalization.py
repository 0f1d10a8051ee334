"""Layer normalization where each rank holds some rows; features that are cut are brought together first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from colossalai.mesh import spread
from colossalai.tensor.colo_tensor import ColoTensor, as_whole, cut_dim, on_wholes, wrap
from colossalai.tensor.op_wrapper import colo_op_impl
from colossalai.tensor.pieces import as_piece
from colossalai.tensor.process_group import TP

_normalize = torch.nn.functional.layer_norm


@colo_op_impl(_normalize)
def _(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    dim = cut_dim(input)
    if dim is None or dim >= input.ndim - len(normalized_shape):
        return on_wholes(_normalize, (input, normalized_shape, weight, bias, eps), {})
    assert isinstance(input, ColoTensor)
    pg = input.process_group
    # I -> R: every rank applies the parameters to its own rows
    weight, bias = (None if p is None else spread(as_piece(as_whole(p)), TP, pg.mesh) for p in (weight, bias))
    return wrap(_normalize(as_piece(input), normalized_shape, weight, bias, eps), pg, input.placement)
