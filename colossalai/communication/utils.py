"""Shapes ahead of tensors, and tensors in equal pieces, for messages between pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.communication.collective import all_gather
from colossalai.communication.exchange import exchange
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc

Shapes = torch.Size | list[torch.Size]


def send_obj_meta(obj: Any, need_meta: bool = True, next_rank: int | None = None) -> bool:
    """Tell the next stage the shape of a tensor, or the shapes of a list of them; True if it must be told
    again.

    So ``need = send_obj_meta(output, need)`` in a loop sends it once.
    """
    if need_meta:
        target = gpc.get_next_global_rank(ParallelMode.PIPELINE) if next_rank is None else next_rank
        exchange([(shapes_of(obj), target)], [], ParallelMode.PIPELINE)
    return False


def recv_obj_meta(obj_shape: Shapes | None = None, prev_rank: int | None = None) -> Shapes:
    """Return the shapes that the stage before sends by ``send_obj_meta``, or ``obj_shape`` if it is known."""
    if obj_shape is not None:
        return obj_shape
    source = gpc.get_prev_global_rank(ParallelMode.PIPELINE) if prev_rank is None else prev_rank
    (shapes,) = exchange([], [source], ParallelMode.PIPELINE)
    return torch.Size(shapes) if _is_shape(shapes) else [torch.Size(shape) for shape in shapes]


def shapes_of(nest: Any) -> Any:
    """The shape of a tensor, or the list of those of all tensors in a nest, as tuples."""
    if isinstance(nest, Tensor):
        return tuple(nest.shape)
    return [tuple(leaf.shape) for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def check_shapes(nest: Any, expected: Any, name: str) -> None:
    """Refuse tensors of other shapes than the receiver was told."""
    if expected is None:
        return
    wanted = tuple(expected) if _is_shape(expected) else [tuple(shape) for shape in expected]
    if (found := shapes_of(nest)) != wanted:
        raise ValueError(
            f"{name} was told the shape {wanted}, but what came has {found}; pass the shape that the other"
            " stage sends, or None to take any"
        )


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) or all(isinstance(length, int) for length in value)


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False) -> Tensor:
    """Return this rank's piece of the flattened ``tensor`` among the ranks of ``ParallelMode.PARALLEL_1D``; a
    copy with ``new_buffer``.
    """
    size, rank = (f(ParallelMode.PARALLEL_1D) for f in (gpc.get_world_size, gpc.get_local_rank))
    if tensor.numel() % size:
        raise ValueError(
            f"a tensor of {tensor.numel()} elements cannot be cut into {size} equal pieces for"
            f" {ParallelMode.PARALLEL_1D}; choose a multiple of {size}"
        )
    piece = tensor.reshape(-1).chunk(size)[rank]
    return piece.clone() if new_buffer else piece


def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """Join the pieces of ``split_tensor_into_1d_equal_chunks``; the result is flat."""
    joined = all_gather(tensor.reshape(-1), 0, ParallelMode.PARALLEL_1D)
    assert isinstance(joined, Tensor)
    return joined
