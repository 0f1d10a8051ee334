"""A bucket: parameters whose weights lie in one flat buffer, and whose gradients travel together.

The weights of the model are views of the buffer, so that gathering updated shards needs no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colossalai._numeric import HALF_DTYPES
from colossalai.mesh import own_grad, set_own_grad
from colossalai.mesh.weights.deferred import recording_of
from colossalai.nn.optimizer.base import MultiTensorOptimizer
from colossalai.utils.memory.host_memory import HUGE, host_empty
from colossalai.utils.parallel import by_averaging_group, is_cut_over_rows
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
    """``weights`` is the buffer; ``grad`` is this rank's shard of the averaged
    gradient, where the pieces are stepped.
    """

    number: int
    layout: FlatLayout
    params: list[Tensor]
    pieces: list[Piece]
    weights: Tensor
    group: dist.ProcessGroup | None = None
    """The ranks whose shards make up the buffer; None for this one alone."""
    home: Tensor | None = (
        None  # what is stepped, where that is not the shard of the weights: masters, or a copy on the host
    )
    grad: Tensor | None = None
    used: list[bool] = field(default_factory=list)  # parameters that had a gradient here since the last step

    def __post_init__(self) -> None:
        self._host_grad: Tensor | None = None
        self.forget()

    def forget(self, *, to_zero: bool = False) -> None:
        """Drop the gradients, or with ``to_zero`` let those that there are be
        zeros: parameters that have one are stepped.
        """
        self.grad = None
        if not to_zero:
            self.used = [False] * len(self.params)

    def fill(self, dtype: torch.dtype) -> Tensor:
        """A flat buffer of the gradients of this rank, in ``dtype``; zeros where there is none."""
        grads = [own_grad(p) for p in self.params]
        is_full = sum(self.layout.sizes) == self.layout.total and all(grad is not None for grad in grads)
        make = torch.empty if is_full else torch.zeros
        buffer = make(self.layout.total, dtype=dtype, device=self.params[0].device)
        for grad, offset, size in zip(grads, self.layout.offsets, self.layout.sizes, strict=True):
            if grad is not None:
                buffer[offset : offset + size].view(grad.shape).copy_(grad)
        return buffer

    def give(self, shard: Tensor, *, add: bool) -> None:
        """Take the averaged gradient of this rank's shard, beside or in the place of what there is."""
        value = self.pieces[0].value
        if self.grad is not None and add:
            self.grad.add_(shard.to(self.grad.device, self.grad.dtype))
        elif shard.device == value.device:
            self.grad = shard.to(value.dtype)
        else:
            if self._host_grad is None or len(self._host_grad) != len(shard):
                self._host_grad = host_buffer(len(shard), value.dtype, pinned=shard.is_cuda)
            self.grad = self._host_grad
            self.grad.copy_(shard, non_blocking=True)

    def write_weights(self) -> None:
        """Round and copy what was stepped to the weights, where it is not the weights themselves."""
        if self.home is not None:
            low, high = self.layout.bounds(self.pieces[0].rank)
            self.weights[low:high].copy_(self.home, non_blocking=True)

    def hand_out(self, used: Sequence[bool]) -> None:
        """Let the pieces have their gradients, except of parameters that no rank has used."""
        for piece, is_used in zip(self.pieces, used, strict=True):
            has = is_used and not piece.is_empty and self.grad is not None
            set_own_grad(piece.value, piece.in_shard(self.grad) if has and self.grad is not None else None)


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """How parameters are put into buckets."""

    size: int
    """Elements; a larger parameter has a bucket of its own."""
    everyone: dist.ProcessGroup | None
    """The ranks that divide the states, of experts those of them with the same ones; None for one alone."""
    offload: bool = False
    """The optimizer steps on the host."""
    dtype: torch.dtype | None = None
    """Weights become of this dtype."""
    alike: bool = False
    """Parameters that were built without memory take the values of the first rank; else each has its own."""


def make_buckets(
    optimizer: Optimizer, params: Sequence[Tensor], options: BucketOptions, keep: Iterable[Tensor] = ()
) -> list[Bucket]:
    """Buckets in the order in which the backward pass is expected to complete
    them: that of ``params``, reversed; those of experts come last.

    Parameters in ``keep`` stay in their dtype.
    """
    kept = {id(p) for p in keep}
    order = list(reversed(params))
    whole = not is_elementwise(optimizer)
    shares = _shares(order, options.everyone, whole)
    open_: dict[tuple[_Share, torch.dtype, torch.device], list[Tensor]] = {}
    closed: list[tuple[list[Tensor], _Share, torch.dtype]] = []
    for param in order:
        dtype = param.dtype if options.dtype is None or id(param) in kept else options.dtype
        kind = (shares[id(param)], dtype, param.device)
        filled = open_.setdefault(kind, [])
        if filled and sum(p.numel() for p in filled) + param.numel() > options.size:
            closed.append((open_.pop(kind), *kind[:2]))
            filled = open_.setdefault(kind, [])
        filled.append(param)
    closed += [(filled, *kind[:2]) for kind, filled in open_.items()]
    closed.sort(key=lambda bucket: is_cut_over_rows(bucket[0][0]))
    return [_bucket(i, optimizer, own, share, dtype, options) for i, (own, share, dtype) in enumerate(closed)]


@dataclass(frozen=True)
class _Share:
    """Who divides a parameter: all ranks of ``group``, or its ``owner`` has all of it."""

    group: dist.ProcessGroup | None
    owner: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """How many ranks there are, and which of them this one is."""
        group = self.group
        return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def _shares(params: Sequence[Tensor], everyone: dist.ProcessGroup | None, whole: bool) -> dict[int, _Share]:
    """The share of each parameter, by its id; ``whole`` ones have owners."""
    found: dict[int, _Share] = {}
    for ranks, own in by_averaging_group(params, everyone):
        group = ranks if ranks is not None and dist.get_world_size(ranks) > 1 else None
        parts, _ = _Share(group).place
        owners = balanced_owners([p.numel() for p in own], parts) if whole else [None] * len(own)
        found |= {id(p): _Share(group, owner) for p, owner in zip(own, owners, strict=True)}
    return found


@torch.no_grad()
def _bucket(
    number: int,
    optimizer: Optimizer,
    params: list[Tensor],
    share: _Share,
    dtype: torch.dtype,
    options: BucketOptions,
) -> Bucket:
    sizes, (parts, rank) = [p.numel() for p in params], share.place
    owner = share.owner
    layout = even_layout(sizes, parts) if owner is None else owned_layout(sizes, parts, owner)
    device = params[0].device
    flat = torch.zeros(layout.total, dtype=dtype, device=device)
    home = _home(optimizer, layout.bounds(rank), dtype, device, options)
    pieces = []
    for i, param in enumerate(params):
        before = _values(param, share.group if options.alike else None)
        param.data = flat[layout.offsets[i] : layout.offsets[i] + sizes[i]].view(param.shape)
        param.data.copy_(before)
        piece = make_piece(param, layout, i, rank, flat, home=home, group=share.group)
        if dtype in HALF_DTYPES and before.dtype not in HALF_DTYPES and not piece.is_empty:
            _keep_digits(optimizer, piece, before)
        pieces.append(piece)
    return Bucket(number, layout, params, pieces, flat, share.group, home)


def _values(param: Tensor, alike: dist.ProcessGroup | None) -> Tensor:
    """The values of ``param``; those of one without memory are computed here, so that there is one at a
    time, by the first rank of ``alike`` for all of it.
    """
    recording = recording_of(param)
    if recording is None:
        return param.data
    if alike is None or dist.get_rank(alike) == 0:
        values = recording.values(param)
    else:
        values = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    if alike is not None:
        values = values.contiguous()
        dist.broadcast(values, group=alike, group_src=0)
    return values


def _home(
    optimizer: Optimizer,
    bounds: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    options: BucketOptions,
) -> Tensor | None:
    """Memory for what is stepped, if that is not the shard in ``bounds`` of the weights itself."""
    low, high = bounds
    master = torch.float32 if needs_masters(optimizer, dtype) else dtype
    if options.offload:
        return host_buffer(high - low, master, pinned=device.type == "cuda")
    return torch.zeros(high - low, dtype=master, device=device) if master != dtype else None


def host_buffer(size: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Zeros in host memory; in pages of its own where it is large, since torch
    rounds pinned memory up to powers of two.
    """
    if pinned and size * dtype.itemsize >= HUGE:
        return host_empty(size, dtype, pinned=True)
    return torch.zeros(size, dtype=dtype, pin_memory=pinned)


def _keep_digits(optimizer: Optimizer, piece: Piece, before: Tensor) -> None:
    """The weights were rounded just now; the optimizer goes on from what they were."""
    exact = piece.cut(before).to(piece.value.device, torch.float32)
    if isinstance(optimizer, MultiTensorOptimizer):
        optimizer.state[piece.value]["master"] = exact.clone()
    else:
        piece.value.data.copy_(exact)
