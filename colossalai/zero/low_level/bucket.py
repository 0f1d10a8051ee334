"""A bucket: parameters whose weights lie in one flat buffer, and whose gradients travel together.

The weights of the model are views of the buffer, so that gathering updated shards needs no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.nn.optimizer.base import HALVES, MultiTensorOptimizer
from colossalai.zero.pieces import (
    FlatLayout,
    Piece,
    balanced_owners,
    even_layout,
    is_elementwise,
    make_piece,
    owned_layout,
)
from colossalai.zero.sharded import needs_masters


@dataclass(eq=False)
class Bucket:
    """``grad`` is this rank's shard of the averaged gradient, where the pieces are stepped; None before there is one."""

    number: int
    layout: FlatLayout
    params: list[Tensor]
    pieces: list[Piece]
    weights: Tensor
    grad: Tensor | None = None
    used: list[bool] = field(default_factory=list)  # parameters that had a gradient here since the last step

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        self.grad = None
        self.used = [False] * len(self.params)

    def fill(self, dtype: torch.dtype) -> Tensor:
        """A flat buffer of the gradients of this rank, in ``dtype``; zeros where there is none."""
        is_full = sum(self.layout.sizes) == self.layout.total and all(p.grad is not None for p in self.params)
        make = torch.empty if is_full else torch.zeros
        buffer = make(self.layout.total, dtype=dtype, device=self.params[0].device)
        for param, offset, size in zip(self.params, self.layout.offsets, self.layout.sizes, strict=True):
            if param.grad is not None:
                buffer[offset : offset + size].view(param.shape).copy_(param.grad)
        return buffer

    def give(self, shard: Tensor, *, add: bool) -> None:
        """Take the averaged gradient of this rank's shard, beside or in the place of what there is."""
        value = self.pieces[0].value
        if self.grad is not None and add:
            self.grad.add_(shard.to(self.grad.device, self.grad.dtype))
        elif shard.device == value.device:
            self.grad = shard.to(value.dtype)
        else:
            pin = shard.is_cuda and value.device.type == "cpu"
            self.grad = torch.empty(shard.shape, dtype=value.dtype, device=value.device, pin_memory=pin)
            self.grad.copy_(shard, non_blocking=True)

    def hand_out(self, used: Sequence[bool]) -> None:
        """Let the pieces have their gradients, except of parameters that no rank has used."""
        for piece, is_used in zip(self.pieces, used, strict=True):
            has = is_used and not piece.is_empty and self.grad is not None
            piece.value.grad = piece.in_shard(self.grad) if has and self.grad is not None else None


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """How parameters are put into buckets."""

    size: int
    """Elements; a larger parameter has a bucket of its own."""
    parts: int
    rank: int
    offload: bool = False
    """The optimizer steps on the host."""
    dtype: torch.dtype | None = None
    """Weights become of this dtype."""


def make_buckets(
    optimizer: Optimizer, params: Sequence[Tensor], options: BucketOptions, keep: Iterable[Tensor] = ()
) -> list[Bucket]:
    """Buckets in the order in which the backward pass is expected to complete them: that of ``params``, reversed.

    Parameters in ``keep`` stay in their dtype.
    """
    kept = {id(p) for p in keep}
    order = list(reversed(params))
    whole = not is_elementwise(optimizer)
    owners = balanced_owners([p.numel() for p in order], options.parts) if whole else [None] * len(order)
    open_: dict[tuple[object, ...], list[Tensor]] = {}
    closed: list[tuple[list[Tensor], int | None, torch.dtype]] = []
    for param, owner in zip(order, owners, strict=True):
        dtype = param.dtype if options.dtype is None or id(param) in kept else options.dtype
        kind = (dtype, param.device, owner)
        filled = open_.setdefault(kind, [])
        if filled and sum(p.numel() for p in filled) + param.numel() > options.size:
            closed.append((open_.pop(kind), owner, dtype))
            filled = open_.setdefault(kind, [])
        filled.append(param)
    closed += [(filled, kind[2], kind[0]) for kind, filled in open_.items()]  # type: ignore[misc]
    return [
        _bucket(i, optimizer, group, owner, dtype, options) for i, (group, owner, dtype) in enumerate(closed)
    ]


@torch.no_grad()
def _bucket(
    number: int,
    optimizer: Optimizer,
    params: list[Tensor],
    owner: int | None,
    dtype: torch.dtype,
    options: BucketOptions,
) -> Bucket:
    sizes = [p.numel() for p in params]
    layout = even_layout(sizes, options.parts) if owner is None else owned_layout(sizes, options.parts, owner)
    device = params[0].device
    flat = torch.zeros(layout.total, dtype=dtype, device=device)
    host = torch.device("cpu") if options.offload else device
    master = torch.float32 if needs_masters(optimizer, dtype) else dtype
    pieces = []
    for i, param in enumerate(params):
        before = param.data
        param.data = flat[layout.offsets[i] : layout.offsets[i] + sizes[i]].view(param.shape)
        param.data.copy_(before)
        piece = make_piece(
            param,
            layout,
            i,
            options.rank,
            flat,
            dtype=master,
            device=host,
            pin=options.offload and device.type == "cuda",
            copy=options.offload,
        )
        if dtype in HALVES and before.dtype not in HALVES and not piece.is_empty:
            _keep_digits(optimizer, piece, before)
        pieces.append(piece)
    return Bucket(number, layout, params, pieces, flat)


def _keep_digits(optimizer: Optimizer, piece: Piece, before: Tensor) -> None:
    """The weights were rounded just now; the optimizer goes on from what they were."""
    exact = piece.cut(before).to(piece.value.device, torch.float32)
    if isinstance(optimizer, MultiTensorOptimizer):
        optimizer.state[piece.value]["master"] = exact.clone()
    else:
        piece.value.data.copy_(exact)
