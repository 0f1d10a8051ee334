"""Activations and their gradients between neighbouring pipeline stages, for schedules of a script's own.

A message is a tensor, or any nest of tensors, and describes itself: shapes and dtypes that are passed are
checked, not needed.  The first stage receives no activation and sends no gradient, the last stage the
reverse; the call does nothing and returns None there.  A rank without pipeline stages beside it is both.

``scatter_gather_tensors`` sends a tensor in pieces, one from each rank of ``ParallelMode.PARALLEL_1D``, which
hold the same activations; the receivers gather them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossalai.communication.exchange import exchange
from colossalai.communication.utils import (
    Shapes,
    check_shapes,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc

Nest = Any
MaybeShapes = Shapes | Sequence[int] | None


class _Pieces(NamedTuple):
    """A tensor of which each tensor-parallel rank sends a piece."""

    shape: tuple[int, ...]
    piece: Tensor


def recv_forward(
    input_tensor_shape: MaybeShapes = None,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Receive the activations of the stage before; their floats are leaves that require gradients."""
    if gpc.is_pipeline_first_stage():
        return None
    return _both([], [_Wanted.forward(input_tensor_shape, prev_rank, dtype, "recv_forward")])[0]


def recv_backward(
    output_grad_shape: MaybeShapes = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Receive the gradients of what this stage has sent forward."""
    if gpc.is_pipeline_last_stage():
        return None
    return _both([], [_Wanted.backward(output_grad_shape, next_rank, dtype, "recv_backward")])[0]


def send_forward(
    output_tensor: Nest, next_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send activations to the next stage."""
    if not gpc.is_pipeline_last_stage():
        _both([_sent(output_tensor, _next(next_rank), scatter_gather_tensors)], [])


def send_backward(
    input_tensor_grad: Nest, prev_rank: int | None = None, scatter_gather_tensors: bool = False
) -> None:
    """Send the gradients of what came from the stage before back to it."""
    if not gpc.is_pipeline_first_stage():
        _both([_sent(input_tensor_grad, _prev(prev_rank), scatter_gather_tensors)], [])


def send_forward_recv_backward(
    output_tensor: Nest,
    output_grad_shape: MaybeShapes = None,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Send activations to the next stage, and receive gradients from it, of an earlier micro-batch."""
    if gpc.is_pipeline_last_stage():
        return None
    name = "send_forward_recv_backward"
    wanted = [_Wanted.backward(output_grad_shape, next_rank, dtype, name)] if recv_next else []
    return _first(_both([_sent(output_tensor, _next(next_rank), scatter_gather_tensors)], wanted))


def send_backward_recv_forward(
    input_tensor_grad: Nest,
    input_tensor_shape: MaybeShapes = None,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Send gradients to the stage before, and receive activations from it, of a later micro-batch."""
    if gpc.is_pipeline_first_stage():
        return None
    name = "send_backward_recv_forward"
    wanted = [_Wanted.forward(input_tensor_shape, prev_rank, dtype, name)] if recv_prev else []
    return _first(_both([_sent(input_tensor_grad, _prev(prev_rank), scatter_gather_tensors)], wanted))


def send_forward_recv_forward(
    output_tensor: Nest,
    input_tensor_shape: MaybeShapes = None,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Send activations to the next rank, and receive some from the rank before.

    The ranks are a ring, for several chunks of the model on each rank: say by ``recv_prev`` and by None for
    the tensor what a rank at the end of the model does not do.
    """
    return send_forward_backward_recv_forward_backward(
        output_tensor,
        None,
        input_tensor_shape,
        recv_prev=recv_prev,
        recv_next=False,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        scatter_gather_tensors=scatter_gather_tensors,
    )[0]


def send_backward_recv_backward(
    input_tensor_grad: Nest,
    output_grad_shape: MaybeShapes = None,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Nest:
    """Send gradients to the rank before, and receive some from the next rank, in a ring."""
    return send_forward_backward_recv_forward_backward(
        None,
        input_tensor_grad,
        None,
        output_grad_shape,
        recv_prev=False,
        recv_next=recv_next,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        scatter_gather_tensors=scatter_gather_tensors,
    )[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: Nest,
    input_tensor_grad: Nest,
    input_tensor_shape: MaybeShapes = None,
    output_grad_shape: MaybeShapes = None,
    recv_prev: bool = True,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> tuple[Nest, Nest]:
    """Do both in a ring: ``(activations of the rank before, gradients of the next rank)``, None where not
    asked for.
    """
    name = "send_forward_backward_recv_forward_backward"
    sends = []
    if output_tensor is not None:
        sends.append(_sent(output_tensor, _next(next_rank), scatter_gather_tensors))
    if input_tensor_grad is not None:
        sends.append(_sent(input_tensor_grad, _prev(prev_rank), scatter_gather_tensors))
    wanted = []
    if recv_prev:
        wanted.append(_Wanted.forward(input_tensor_shape, prev_rank, dtype, name))
    if recv_next:
        wanted.append(_Wanted.backward(output_grad_shape, next_rank, dtype, name))
    received = _both(sends, wanted)
    return received.pop(0) if recv_prev else None, received.pop(0) if recv_next else None


class _Wanted(NamedTuple):
    """A message that is to come, and what the caller knows about it."""

    source: int
    shapes: MaybeShapes
    dtype: torch.dtype | None
    requires_grad: bool
    name: str

    @classmethod
    def forward(cls, shapes: MaybeShapes, rank: int | None, dtype: torch.dtype | None, name: str) -> _Wanted:
        return cls(_prev(rank), shapes, dtype, True, name)

    @classmethod
    def backward(cls, shapes: MaybeShapes, rank: int | None, dtype: torch.dtype | None, name: str) -> _Wanted:
        return cls(_next(rank), shapes, dtype, False, name)

    def check(self, nest: Nest) -> Nest:
        if isinstance(nest, _Pieces):
            nest = gather_split_1d_tensor(nest.piece).view(nest.shape)
        check_shapes(nest, self.shapes, self.name)
        for leaf in tree_leaves(nest):
            if not isinstance(leaf, Tensor):
                continue
            if self.dtype is not None and leaf.dtype != self.dtype:
                raise ValueError(
                    f"{self.name} was told dtype={self.dtype}, but what came is {leaf.dtype}; pass the dtype"
                    " that the other stage sends, or None to take any"
                )
            leaf.requires_grad_(self.requires_grad and leaf.is_floating_point())
        return nest


def _both(sends: list[tuple[Nest, int]], wanted: list[_Wanted]) -> list[Nest]:
    received = exchange(sends, [one.source for one in wanted], ParallelMode.PIPELINE)
    return [one.check(nest) for one, nest in zip(wanted, received, strict=True)]


def _sent(nest: Nest, target: int, in_pieces: bool) -> tuple[Nest, int]:
    if in_pieces:
        if not isinstance(nest, Tensor):
            raise TypeError(f"scatter_gather_tensors sends one tensor in pieces, got {type(nest).__name__}")
        if nest.numel() % gpc.get_world_size(ParallelMode.PARALLEL_1D) == 0:
            nest = _Pieces(tuple(nest.shape), split_tensor_into_1d_equal_chunks(nest.detach()))
    return nest, target


def _first(received: list[Nest]) -> Nest:
    return received[0] if received else None


def _next(rank: int | None) -> int:
    return gpc.get_next_global_rank(ParallelMode.PIPELINE) if rank is None else rank


def _prev(rank: int | None) -> int:
    return gpc.get_prev_global_rank(ParallelMode.PIPELINE) if rank is None else rank
