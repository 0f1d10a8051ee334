"""Which slice of every parameter a rank owns for the optimizer step.

Parameters are laid one after another in a flat buffer, which is cut into equal shards, one for each rank;
this rank's *piece* of a parameter is what its shard holds of it.  So a shard travels as one block, and the
cut is even, whatever the shapes.  A piece may be empty: then another rank owns all of that parameter.

Some optimizers must see whole parameters (LAMB takes their norms).  For them a
buffer has one ``owner``, who has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai._numeric import ceil_div, round_up
from colossalai.interface import Holding
from colossalai.mesh import Layout, full_shape, place, placement
from colossalai.utils import copy_tensor_parallel_attributes
from colossalai.utils.optimizer_state import SERIAL_SHAPE

# Kernels read 16 bytes at once, from addresses that are multiples of that: 8 elements in half precision.
# Shards are cut more coarsely.
ALIGNMENT, SHARD_ALIGNMENT = 8, 64

# The attribute of a parameter whose values lie in chunks, and come and go.
IN_CHUNKS = "_colo_in_chunks"

# The optimizers of torch that update every element without knowing the others.
ELEMENTWISE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


@dataclass(frozen=True)
class FlatLayout:
    """Where parameters lie in a flat buffer of ``parts`` shards of ``shard`` elements.

    ``offsets`` and ``sizes`` have an entry for each parameter.  With an
    ``owner``, the buffer is not cut: it is one shard, the owner's.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    parts: int
    shard: int
    owner: int | None = None

    @property
    def total(self) -> int:
        """Elements of the whole buffer."""
        return self.shard if self.owner is not None else self.shard * self.parts

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the shard of ``rank`` begins and ends in the buffer."""
        if self.owner is not None:
            return 0, self.shard if rank == self.owner else 0
        return rank * self.shard, (rank + 1) * self.shard

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """Start and end, in the flattened parameter ``index``, of what ``rank`` owns of it.

        Equal if that is nothing.
        """
        low, high = self.bounds(rank)
        offset, size = self.offsets[index], self.sizes[index]
        start = min(max(low - offset, 0), size)
        return start, max(min(high - offset, size), start)

    def owners(self, index: int) -> list[tuple[int, int, int]]:
        """``(rank, start, end)`` of every piece of parameter ``index`` that is not empty, in order."""
        pieces = [(rank, *self.piece(index, rank)) for rank in range(self.parts)]
        return [(rank, start, end) for rank, start, end in pieces if end > start]


def even_layout(sizes: Iterable[int], parts: int) -> FlatLayout:
    """Parameters one after another, cut into ``parts`` equal shards; the last is filled up."""
    sizes = tuple(sizes)
    offsets, total = _one_after_another(sizes)
    per_rank = ceil_div(total, parts)
    # aligned shards only where that costs little: a model of a few numbers is cut as it is
    shard = round_up(per_rank, SHARD_ALIGNMENT) if per_rank >= 64 * SHARD_ALIGNMENT else per_rank
    return FlatLayout(sizes, offsets, parts, shard)


def owned_layout(sizes: Iterable[int], parts: int, owner: int) -> FlatLayout:
    """Parameters one after another, all of them the piece of ``owner``."""
    sizes = tuple(sizes)
    offsets, total = _one_after_another(sizes)
    return FlatLayout(sizes, offsets, parts, total, owner)


def balanced_owners(sizes: Sequence[int], parts: int) -> list[int]:
    """A rank for each of several whole parameters, such that the ranks own
    about the same number of elements.
    """
    load = [0] * parts
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        owner[index] = rank
        load[rank] += sizes[index]
    return owner


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a slice of a parameter can be stepped without the rest, as far as we know.

    An optimizer of a script's own says so by ``elementwise = True`` in its
    class; otherwise it is given whole parameters.
    """
    kind = type(optimizer)
    if (told := getattr(kind, "elementwise", None)) is not None:
        return bool(told)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


def or_say_so(optimizer: Optimizer) -> str:
    """The end of a refusal of ``optimizer``: what a script can do whose own
    optimizer is refused without need.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") or hasattr(kind, "elementwise"):
        return ""
    return f"; if {kind.__name__} does, say so by elementwise = True in its class"


def whole_parameters_problem(optimizer: Any, ranks: int) -> str | None:
    """Why ``optimizer`` cannot step chunks that are cut over ``ranks``; None if it can."""
    if ranks == 1 or is_elementwise(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} needs whole parameters, but Gemini cuts chunks evenly over {ranks}"
        f" ranks; use an optimizer that works element by element, such as HybridAdam{or_say_so(optimizer)}"
    )


@dataclass(eq=False)
class Piece:
    """This rank's slice ``[start, end)`` of the flattened ``param``.

    ``value`` is what the optimizer steps, in the place of the parameter.  ``weight`` is the slice where the
    model's weights lie, to be gathered by the others.  Both are the same memory, unless the value is an fp32
    master or waits on the host.
    """

    param: Tensor
    layout: FlatLayout
    index: int
    rank: int
    weight: Tensor
    value: nn.Parameter
    seen: int  # changes of ``param`` when ``value`` last agreed with it; -1 to compare them
    group: dist.ProcessGroup | None = None  # whose ranks own the other slices; None for a single one

    @property
    def start(self) -> int:
        return self.layout.piece(self.index, self.rank)[0]

    @property
    def end(self) -> int:
        return self.layout.piece(self.index, self.rank)[1]

    @property
    def is_empty(self) -> bool:
        return self.value.numel() == 0

    @property
    def holding(self) -> Holding:
        """What ``value`` is of the parameter, for checkpoints."""
        if self.is_whole and not self.is_empty:
            return Holding(self.param, self.value)
        return Holding(self.param, self.value, self.start, self.end)

    @property
    def is_whole(self) -> bool:
        """Whether the value has the shape of the parameter, for an optimizer that needs it."""
        return self.layout.owner is not None

    @property
    def is_shared(self) -> bool:
        """Whether value and weight are the same memory, so that a step is seen
        in the model without a copy.
        """
        return self.value.data_ptr() == self.weight.data_ptr() and self.value.dtype == self.weight.dtype

    def cut(self, whole: Tensor) -> Tensor:
        """The slice of a tensor in the shape of ``param`` (or flat), in the shape of ``value``.

        A view where torch can.
        """
        return whole.reshape(-1)[self.start : self.end].view(self.value.shape)

    def fit(self, value: Any) -> Any:
        """The slice of a tensor in the shape of ``param``, as a tensor of its own.

        Anything else, also a slice, as it is.
        """
        if not isinstance(value, Tensor):
            return value
        if value.shape == self.value.shape:
            return (
                value.contiguous()
            )  # checkpoints read and write it flat; states are strided as their parameter is
        if value.shape != self.param.shape:
            return value
        return self.cut(value).clone()

    def in_shard(self, shard: Tensor) -> Tensor:
        """The slice of a flat tensor like this rank's shard of the buffer, in the shape of ``value``."""
        low, _ = self.layout.bounds(self.rank)
        begin = self.layout.offsets[self.index] + self.start - low
        return shard[begin : begin + self.end - self.start].view(self.value.shape)


def make_piece(
    param: Tensor,
    layout: FlatLayout,
    index: int,
    rank: int,
    buffer: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin: bool = False,
    home: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Piece:
    """The piece of ``param``, entry ``index`` of a flat ``buffer`` that holds its values.

    ``dtype`` and ``device`` say what the optimizer steps, where that is not the buffer itself; ``pin`` it, if
    it waits on the host.  ``home``, a flat tensor like this rank's shard, is the memory for it.  ``group``
    has the ranks of ``layout``.
    """
    start, end = layout.piece(index, rank)
    offset = layout.offsets[index]
    weight = buffer[offset + start : offset + end] if end > start else buffer[:0]
    return piece_of(
        param, layout, index, rank, weight, dtype=dtype, device=device, pin=pin, home=home, group=group
    )


def piece_of(
    param: Tensor,
    layout: FlatLayout,
    index: int,
    rank: int,
    weight: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin: bool = False,
    home: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Piece:
    """The piece of ``param`` whose values, the slice that ``layout`` gives to ``rank``, lie in ``weight``.

    A piece that is all of its parameter has its shape, others are flat.
    """
    if 0 < weight.numel() == param.numel():
        weight = weight.view(param.shape)
    value = (
        weight.data
    )  # with a counter of changes of its own, see [Note: which weights count] in nn.optimizer.refresh_masters
    if home is not None:
        start, end = layout.piece(index, rank)
        begin = layout.offsets[index] + start - layout.bounds(rank)[0]
        value = home[begin : begin + end - start].view(weight.shape).copy_(value).data
    elif (dtype or weight.dtype, device or weight.device) != (weight.dtype, weight.device) or pin:
        target = torch.empty(
            weight.shape, dtype=dtype or weight.dtype, device=device or weight.device, pin_memory=pin
        )
        value = target.copy_(value)
    piece = Piece(param, layout, index, rank, weight, nn.Parameter(value), param._version, group)
    setattr(piece.value, SERIAL_SHAPE, param.shape)
    copy_tensor_parallel_attributes(param, piece.value)
    if not piece.is_whole and (
        axes := placement(param).sharded
    ):  # the piece is flat, and cut by the same ranks
        place(piece.value, Layout((axes,)), (full_shape(param).numel(),))
    return piece


def _one_after_another(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The offsets of tensors of these sizes, each aligned, and the end of the last."""
    offsets, end = [], 0
    for size in sizes:
        start = round_up(end, ALIGNMENT)
        offsets.append(start)
        end = start + size
    return tuple(offsets), end
