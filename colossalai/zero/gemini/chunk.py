"""A chunk: parameters, in the order in which the model made them, one after the other in one flat buffer.

The ranks of a data-parallel group share a chunk: each keeps ``1 / ranks`` of it, its *shard*, at the chunk's
*home* tier, and the *whole* is gathered on the compute tier only while it is needed.  Parameters are views of
the whole.

[Note: one storage for life]
Autograd saves views of weights (``weight.t()`` of a linear layer) that must be right again in the backward
pass.  So the whole of a chunk has one storage for ever, whose memory is freed and filled again.  Touching
freed memory ends a process without a message; so a parameter whose chunk is not on the compute tier shows NaN
instead, in its true shape.

[Note: who may read a parameter] Modules read parameters while they compute, and scripts inside
``whole_parameters()``.  At all other times the class of a parameter that comes and goes refuses to be read or
written (``colossalai.zero.absent_tensors``), even if its chunk still is on the compute tier: what is read
then would be gone when the backward pass needs it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai._numeric import round_up
from colossalai.mesh._compat import plain_torch
from colossalai.tensor import ProcessGroup
from colossalai.zero.absent_tensors import REASON
from colossalai.zero.gemini.tiers import PendingCopy, Tier
from colossalai.zero.pieces import FlatLayout


class TensorState(Enum):
    """What is being done with a parameter; ``STATE_TRANS`` has the changes that are possible."""

    FREE = 0
    """Its values are not on the compute device."""
    COMPUTE = 1
    """A module computes with it, forward or backward."""
    HOLD = 2
    """Its values are on the compute device and not in use."""
    HOLD_AFTER_BWD = 3
    """Its gradient is done, and lies where the backward pass left it."""
    READY_FOR_REDUCE = 4
    """Its gradient lies in the gradient buffer of its chunk."""


_S = TensorState
STATE_TRANS = frozenset(
    {
        (_S.FREE, _S.HOLD),
        (_S.FREE, _S.COMPUTE),
        (_S.HOLD, _S.FREE),
        (_S.HOLD, _S.COMPUTE),
        (_S.COMPUTE, _S.HOLD),
        (_S.COMPUTE, _S.HOLD_AFTER_BWD),
        (_S.HOLD_AFTER_BWD, _S.COMPUTE),
        (_S.HOLD_AFTER_BWD, _S.READY_FOR_REDUCE),
        (_S.READY_FOR_REDUCE, _S.HOLD),
    }
)


def check_transition(name: str, old: TensorState, new: TensorState) -> None:
    if old is not new and (old, new) not in STATE_TRANS:
        allowed = ", ".join(sorted(b.name for a, b in STATE_TRANS if a is old))
        raise RuntimeError(
            f"parameter {name!r} cannot go from {old.name} to {new.name}; from {old.name} it can go to"
            f" {allowed}"
        )


ALIGN = 16  # elements: every shard and every parameter begins at an address that vector instructions like


class ChunkFullError(Exception):
    """A parameter does not fit into what is left of a chunk."""


@dataclass(eq=False)
class ParamSlot:
    """The place of a parameter in its chunk."""

    param: nn.Parameter = field(repr=False)  # tensors that have given their memory away cannot be printed
    name: str
    offset: int
    numel: int
    shape: torch.Size
    view: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    blank: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    state: TensorState = TensorState.FREE
    users: set[Any] = field(default_factory=set, repr=False)
    moves: bool = False  # its chunk comes and goes

    def __post_init__(self) -> None:
        self.kind: type = type(self.param)
        self.native: type = self.kind  # while it can be read
        self.away: type = self.native

    def open(self, user: Any) -> None:
        """Let ``user`` read the parameter."""
        if self.moves and not self.users:
            self.param.__class__ = self.native
        self.users.add(user)

    def close(self, user: Any) -> None:
        self.users.discard(user)
        if self.moves and not self.users:
            self.param.__class__ = self.away

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @property
    def trained(self) -> bool:
        return self.param.requires_grad

    def to(self, state: TensorState) -> None:
        check_transition(self.name, self.state, state)
        self.state = state


@dataclass(frozen=True)
class ChunkRanks:
    """The ranks that share chunks, and the two process groups they communicate over.

    Gathering has a group of its own: where a rank skips a part of the model, its gradients come at another
    moment than those of the others, and would be mistaken for a gathered chunk.
    """

    size: int = 1
    rank: int = 0
    gather: Any = None
    reduce: Any = None
    staged: bool = False  # the backend cannot reach the device: tensors travel over the CPU
    pieces: int = 1
    """Into how many pieces ranks with other tokens cut the parameters (experts): gradients are sums over the
    tokens of all of them, and are divided by this before these ranks average them.
    """


class Chunk:
    """Parameters of one dtype in one buffer of ``chunk_size`` elements.

    Args:
        process_group: whose data-parallel ranks share the chunk; a group of torch, or None for this rank
            alone.
        init_device: where its manager lets it rest at first.
        cpu_shard_init: let it rest in host memory, whatever ``init_device`` says.
        keep_gathered: its manager does not free the whole.
        pin_memory: page-locked host memory, if there is a GPU.
        index: its number among the chunks of a model.
        ranks: instead of ``process_group``.
    """

    def __init__(
        self,
        chunk_size: int,
        process_group: ProcessGroup | dist.ProcessGroup | None,
        dtype: torch.dtype,
        init_device: torch.device | str | None = None,
        cpu_shard_init: bool = False,
        keep_gathered: bool = False,
        pin_memory: bool = False,
        *,
        index: int = 0,
        ranks: ChunkRanks | None = None,
    ) -> None:
        if ranks is None:
            ranks = _ranks_of(process_group)
        if chunk_size % (ranks.size * ALIGN):
            raise ValueError(
                f"a chunk shared by {ranks.size} ranks needs a size that is a multiple of"
                f" {ranks.size * ALIGN}, got {chunk_size}"
            )
        self.index, self.size, self.dtype, self.ranks = index, chunk_size, dtype, ranks
        self.first_device = torch.device("cpu" if cpu_shard_init or init_device is None else init_device)
        self.keep_gathered, self.pin_memory = keep_gathered, pin_memory
        self.slots: list[ParamSlot] = []
        self.used = 0
        self.users: set[Any] = set()
        self.arriving: PendingCopy | None = None
        self.present = False
        self.home: Tier | None = None
        self.compute: Tier | None = None
        self.shard = torch.empty(0)
        self.flat = torch.empty(0)

    # Layout

    @property
    def name(self) -> str:
        """For messages: its number and its first and last parameter."""
        names = [slot.name for slot in self.slots]
        inside = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else "nothing"
        return f"chunk {self.index} ({inside})"

    @property
    def shard_size(self) -> int:
        return self.size // self.ranks.size

    @property
    def own(self) -> slice:
        """The elements that this rank keeps."""
        return slice(self.ranks.rank * self.shard_size, (self.ranks.rank + 1) * self.shard_size)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        return self.shard_size * self.dtype.itemsize

    @property
    def wasted(self) -> int:
        """Elements that belong to no parameter."""
        return self.size - sum(slot.numel for slot in self.slots)

    @property
    def trained(self) -> bool:
        """Whether any of its parameters gets a gradient."""
        return any(slot.trained for slot in self.slots)

    @property
    def resident(self) -> bool:
        """Whether the whole never leaves the compute tier: this rank keeps all of it, and keeps it there."""
        return self.home is self.compute and self.ranks.size == 1

    def layout(self) -> FlatLayout:
        """Return where parameters lie and which rank keeps them, in the form that all plans of ZeRO use."""
        sizes, offsets = zip(*((slot.numel, slot.offset) for slot in self.slots), strict=True)
        return FlatLayout(sizes, offsets, self.ranks.size, self.shard_size)

    def own_part(self, slot: ParamSlot, shard: Tensor | None = None) -> Tensor | None:
        """Return what this rank's shard (or a tensor like it) holds of ``slot``, flat; None if nothing."""
        low = max(slot.offset, self.own.start) - self.own.start
        high = min(slot.end, self.own.stop) - self.own.start
        return (self.shard if shard is None else shard)[low:high] if high > low else None

    def append(self, param: nn.Parameter, name: str) -> ParamSlot:
        offset = aligned(self.used)
        if offset + param.numel() > self.size:
            raise ChunkFullError(
                f"parameter {name!r} has {param.numel():,} elements, but {self.name} has room for"
                f" {self.size - offset:,}"
            )
        slot = ParamSlot(param, name, offset, param.numel(), param.shape)
        setattr(param, REASON, _reason(name))
        self.slots.append(slot)
        self.used = slot.end
        return slot

    # Memory

    def place(self, compute: Tier, home: Tier, on_disk: bool = False) -> None:
        """Allocate the shard at ``home``, and the whole on the compute tier, to be filled.

        A shard that rests ``on_disk`` has no memory: it shows NaN.
        """
        self.compute, self.home = compute, home
        compute.reserve(self.nbytes, self.name)
        self.flat = torch.zeros(self.size, dtype=self.dtype, device=compute.device)
        self.present = True
        for slot in self.slots:
            slot.view = self.flat[slot.offset : slot.end].view(slot.shape)
            blank = torch.full((), float("nan"), dtype=self.dtype, device=compute.device)
            slot.blank = blank.expand(slot.shape)
            slot.state = TensorState.HOLD
        if self.resident:
            self.shard = self.flat
        elif on_disk:  # nothing to touch
            self.shard = torch.full((), float("nan"), dtype=self.dtype).expand(self.shard_size)
        else:
            self.shard = home.empty(self.shard_size, self.dtype, self.name)

    def show(self) -> None:
        """Make the parameters views of the whole, or NaN while it is not on the compute tier."""
        with plain_torch():
            for slot in self.slots:
                slot.param.data = slot.view if self.present else slot.blank

    def guard(self) -> None:
        """Let parameters that come and go refuse to be read; called when the chunk gets another home."""
        for slot in self.slots:
            slot.moves = not self.resident
            slot.param.__class__ = slot.away if slot.moves and not slot.users else slot.native

    def allocate(self) -> None:
        """Allocate the whole, on the compute tier."""
        assert self.compute is not None
        assert not self.present, self.name
        self.compute.reserve(self.nbytes, self.name)
        self.flat.untyped_storage().resize_(self.nbytes)
        self.present = True
        for slot in self.slots:
            if slot.state is TensorState.FREE:
                slot.to(TensorState.HOLD)
        self.show()

    def drop(self) -> None:
        """Free the memory of the whole."""
        assert self.compute is not None
        assert self.present, self.name
        assert not self.users, self.name
        assert not self.resident, self.name
        if self.arriving is not None:
            self.arriving.wait()  # or the copy would write into memory that something else has got
            self.arriving = None
        self.present = False
        for slot in self.slots:
            if slot.state is not TensorState.READY_FOR_REDUCE:  # its gradient is there without it
                slot.to(TensorState.FREE)
        self.show()
        self.flat.untyped_storage().resize_(0)
        self.compute.release(self.nbytes)

    def keep_own(self) -> None:
        """Copy this rank's shard out of the whole."""
        if not self.resident:
            self.shard.copy_(self.flat[self.own])


def _reason(name: str) -> str:
    return (
        f"the values of {name!r}, which lie in a chunk and are whole only while a module of the model"
        " computes with them; compute with them in a forward, read them inside `with"
        " model.whole_parameters():` or by model.state_dict(), write them by model.load_state_dict(...), and"
        " save them by model.save_pretrained or booster.save_model, on every rank; the model is what boost"
        " returned"
    )


def default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _ranks_of(group: ProcessGroup | dist.ProcessGroup | None) -> ChunkRanks:
    if isinstance(group, ProcessGroup):
        group = group.dp_process_group() if group.dp_world_size() > 1 else None
    return group_ranks(group, default_device())


def aligned(position: int) -> int:
    return round_up(position, ALIGN)


def padded(size: int, ranks: int) -> int:
    """Return the smallest size of a chunk of at least ``size`` elements."""
    return round_up(max(size, 1), ranks * ALIGN)


# A second group of the same ranks for each data-parallel group, whose threads and sockets would otherwise be
# as many as models.
_second: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def group_ranks(group: dist.ProcessGroup | None, device: torch.device, pieces: int = 1) -> ChunkRanks:
    """Return the ranks of a data-parallel group, with a second group of the same ranks for gradients."""
    if group is None or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ChunkRanks(pieces=pieces)
    members = dist.get_process_group_ranks(group)
    if group not in _second:
        _second[group] = dist.new_group(members, use_local_synchronization=True)
    staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
    return ChunkRanks(len(members), dist.get_rank(group), group, _second[group], staged, pieces)
