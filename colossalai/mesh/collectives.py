"""The collectives of the core, on one mesh axis each, and the account of what they moved.

Nothing else in the core talks to ``torch.distributed``, so :func:`count_communication` sees every byte.  On
an axis of size 1 each function returns its input and nothing is counted.

Pieces may differ in length by one (see :func:`colossalai.mesh.layout.piece`); ``length`` is then the length
of the whole dim.  Backends want equal pieces, so uneven ones travel padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from colossalai._numeric import ceil_div
from colossalai.mesh._compat import all_gather_single, reduce_scatter_single
from colossalai.mesh.layout import piece
from colossalai.mesh.mesh import Axes, Mesh

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "shift"]

# A collective under way: calling it waits for the end and gives the result.
Pending = Callable[[], Tensor]

# How often the whole tensor crosses the wire from one rank, in units of (p - 1) / p, with a ring.  A
# broadcast or a reduce is a chain of p - 1 sends: a rank sends (p - 1) / p of its panels when the source goes
# round.
_RING_PASSES: dict[str, int] = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
    "all_to_all": 1,
    "broadcast": 1,
    "reduce": 1,
}


@dataclass(frozen=True)
class Transfer:
    """One collective as one rank saw it."""

    kind: Kind
    axis: str
    size: int
    """Ranks that took part."""
    bytes: int
    """Size of the whole tensor: what a gather yields, and what the other kinds take."""
    leaving: int | None = None
    """Bytes that leave this rank, where they do not follow from the above: of shifts and ragged exchanges."""
    in_bucket: bool = field(default=False, compare=False)
    """Whether it is a part of one collective, whose latency the parts share."""

    @property
    def sent(self) -> float:
        """Bytes this rank sends with the ring algorithm; for broadcast and reduce the mean over the ranks."""
        if self.leaving is not None:
            return self.leaving
        return _RING_PASSES[self.kind] * self.bytes * (self.size - 1) / self.size


@dataclass
class CommunicationLog:
    """The collectives issued on this rank while :func:`count_communication` was active, in order."""

    transfers: list[Transfer] = field(default_factory=list)

    def calls(self, kind: Kind | None = None, axis: str | None = None) -> int:
        return sum(1 for _ in self._matching(kind, axis))

    def bytes(self, kind: Kind | None = None, axis: str | None = None) -> int:
        return sum(t.bytes for t in self._matching(kind, axis))

    def sent(self, kind: Kind | None = None, axis: str | None = None) -> float:
        return sum(t.sent for t in self._matching(kind, axis))

    def table(self) -> str:
        """One line per kind and axis, for people."""
        lines = [f"{'collective':16}{'axis':8}{'ranks':>6}{'calls':>8}{'bytes':>16}{'sent per rank':>16}"]
        for kind, axis, size in dict.fromkeys((t.kind, t.axis, t.size) for t in self.transfers):
            calls, total, sent = self.calls(kind, axis), self.bytes(kind, axis), self.sent(kind, axis)
            lines.append(f"{kind:16}{axis:8}{size:6}{calls:8}{total:16,}{sent:16,.0f}")
        return "\n".join(lines)

    def _matching(self, kind: Kind | None, axis: str | None) -> Iterator[Transfer]:
        if kind is not None and kind not in get_args(
            Kind
        ):  # or a test against 0 would pass by its misspelling
            raise ValueError(f"there is no collective {kind!r}; there are {', '.join(get_args(Kind))}")
        return (t for t in self.transfers if kind in (None, t.kind) and axis in (None, t.axis))


_active_logs: list[CommunicationLog] = []


@contextmanager
def count_communication() -> Iterator[CommunicationLog]:
    """Count every collective that the core issues on this rank, forward and backward, inside the block."""
    log = CommunicationLog()
    _active_logs.append(log)
    try:
        yield log
    finally:
        # by identity: two logs that saw the same transfers are equal
        _active_logs[:] = [other for other in _active_logs if other is not log]


def note_transfer(kind: Kind, axis: str, size: int, nbytes: int, leaving: int | None = None) -> None:
    """Put a collective among ``size`` ranks into the account; for plans that talk to a group themselves."""
    for log in _active_logs:
        log.transfers.append(Transfer(kind, axis, size, nbytes, leaving))


_in_rank_order: ContextVar[bool] = ContextVar("sums in the order of ranks", default=False)


@contextmanager
def sums_in_rank_order() -> Iterator[None]:
    """Add up floating-point numbers of ranks in the order of the ranks in this block.

    A backend begins every part of a tensor at another rank, so what a number is rounded to depends on its
    place; here every rank gets all terms, which are more bytes.  All ranks enter the block alike.
    """
    token = _in_rank_order.set(True)
    try:
        yield
    finally:
        _in_rank_order.reset(token)


def _ordered(x: Tensor) -> bool:
    return x.is_floating_point() and _in_rank_order.get()


def _sum_in_order(terms: Tensor) -> Tensor:
    first, *rest = terms.unbind(0)
    # 16 bits are rounded once
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for term in rest:
        total += term
    return total.to(first.dtype)


def _record(kind: Kind, mesh: Mesh, axis: str, nbytes: int) -> None:
    note_transfer(kind, axis, mesh.size[axis], nbytes)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int, length: int | None = None) -> Tensor:
    """The pieces of all ranks of ``axis``, joined along ``dim``."""
    return start_all_gather(x, mesh, axis, dim, length)()


def start_all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int, length: int | None = None) -> Pending:
    parts = mesh.size[axis]
    if parts == 1:
        return lambda: x
    longest = x.size(dim) if length is None else ceil_div(length, parts)
    x = _padded(x, dim, longest).contiguous()
    gathered = x.new_empty((parts, *x.shape))
    work = all_gather_single(gathered.flatten(0, 1), x, group=mesh.group(axis), async_op=True)
    _record("all_gather", mesh, axis, _nbytes(gathered))

    def joined() -> Tensor:
        if dim == 0 and (length is None or length % parts == 0):
            return gathered.flatten(0, 1)
        pieces = gathered.unbind(0)
        if length is not None:
            pieces = tuple(t.narrow(dim, 0, piece(length, parts, i)[1]) for i, t in enumerate(pieces))
        return torch.cat(pieces, dim)

    return _after(work, joined, x)


def gather_numbers(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The number ``x`` of every rank of a group that is no axis of a mesh of ours."""
    numbers = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, x, group=group)
    note_transfer("all_gather", "other", len(numbers), len(numbers) * _nbytes(x))
    return torch.stack(numbers)


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int, *, uneven: bool = False) -> Tensor:
    """This rank's piece along ``dim`` of the sum over ``axis``."""
    return start_reduce_scatter(x, mesh, axis, dim, uneven=uneven)()


def start_reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int, *, uneven: bool = False) -> Pending:
    parts = mesh.size[axis]
    if parts == 1:
        return lambda: x
    pieces = _pieces(x, mesh, axis, dim, uneven)
    own = pieces[mesh.coord[axis]].size(dim)
    # torch.stack keeps the order of the dims in memory where all of them have the same
    stacked = torch.stack([_padded(t, dim, pieces[0].size(dim)) for t in pieces]).contiguous()
    if _ordered(x):
        terms = torch.empty_like(stacked)
        work = dist.all_to_all_single(terms, stacked, group=mesh.group(axis), async_op=True)
        _record("all_to_all", mesh, axis, _nbytes(stacked))
        return _after(work, lambda: _sum_in_order(terms).narrow(dim, 0, own).contiguous(), stacked)
    out = torch.empty_like(stacked[0])
    work = reduce_scatter_single(out, stacked.flatten(0, 1), group=mesh.group(axis), async_op=True)
    _record("reduce_scatter", mesh, axis, _nbytes(stacked))
    return _after(work, lambda: out.narrow(dim, 0, own).contiguous(), stacked)


def all_reduce(x: Tensor, mesh: Mesh, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or ``op``) over ``axis``, on every rank; ``x`` is left as it is."""
    if mesh.size[axis] == 1:
        return x
    return start_all_reduce(x.clone(memory_format=torch.contiguous_format), mesh, axis, op)()


def start_all_reduce(
    x: Tensor, mesh: Mesh, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """The same in ``x`` itself, if it is contiguous."""
    if mesh.size[axis] == 1:
        return lambda: x
    x = x.contiguous()
    if op == dist.ReduceOp.SUM and _ordered(x):
        gathered = start_all_gather(x[None], mesh, axis, 0)
        return lambda: x.copy_(_sum_in_order(gathered()))
    work = dist.all_reduce(x, op=op, group=mesh.group(axis), async_op=True)
    _record("all_reduce", mesh, axis, _nbytes(x))
    return _after(work, lambda: x)


def all_to_all(x: Tensor, mesh: Mesh, axis: str, uncut: int, cut: int, length: int | None = None) -> Tensor:
    """From pieces along dim ``uncut`` to pieces along dim ``cut``; ``length`` is the whole length of
    ``uncut``.
    """
    parts = mesh.size[axis]
    if parts == 1:
        return x
    pieces = _pieces(x, mesh, axis, cut, uneven=length is not None)
    own = pieces[mesh.coord[axis]].size(cut)
    longest = x.size(uncut) if length is None else ceil_div(length, parts)
    padded = [_padded(_padded(t, cut, pieces[0].size(cut)), uncut, longest) for t in pieces]
    sent = torch.stack(padded).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=mesh.group(axis))
    _record("all_to_all", mesh, axis, _nbytes(sent))
    lengths = [longest if length is None else piece(length, parts, i)[1] for i in range(parts)]
    arrived = [
        t.narrow(uncut, 0, n).narrow(cut, 0, own) for t, n in zip(received.unbind(0), lengths, strict=True)
    ]
    return torch.cat(arrived, uncut)


def all_to_all_ragged(
    x: Tensor, send: Sequence[int], receive: Sequence[int], mesh: Mesh, axes: str | Axes
) -> Tensor:
    """The rows that all ranks of ``axes`` (one, or several joined) have for this one, in their order.

    ``x`` holds ``send[i]`` rows (along dim 0) for the i-th rank, which gives ``receive[i]``: what a rank
    sends to another must be what the other receives, so ranks exchange the numbers first.
    """
    return start_all_to_all_ragged(x, send, receive, mesh, axes)()


def start_all_to_all_ragged(
    x: Tensor, send: Sequence[int], receive: Sequence[int], mesh: Mesh, axes: str | Axes
) -> Pending:
    """The same while the caller does something else; ``x`` must not change before the end."""
    axes = (axes,) if isinstance(axes, str) else axes
    ranks = mesh.group_size(*axes)
    if len(send) != ranks or len(receive) != ranks or sum(send) != x.size(0):
        raise ValueError(
            f"axis {'+'.join(axes)!r} has {ranks} ranks and the tensor {x.size(0)} rows: one number for each"
            f" rank is needed, of rows that are sent and of rows that come; got {send} and {receive}"
        )
    return _start_exchange("all_to_all", x, send, receive, mesh, axes)


def ring_shift(x: Tensor, mesh: Mesh, axis: str, by: int = 1) -> Tensor:
    """What the rank ``by`` places before this one on the ring of ``axis`` holds, of the same shape."""
    return start_ring_shift(x, mesh, axis, by)()


def start_ring_shift(x: Tensor, mesh: Mesh, axis: str, by: int = 1) -> Pending:
    """The same while the caller does something else; ``x`` must not change before the end.

    It is an all-to-all with one piece for one rank: gloo cannot send a GPU's tensor by itself, and NCCL makes
    one send and one receive of it.
    """
    parts, here = mesh.size[axis], mesh.coord[axis]
    if by % parts == 0:
        return lambda: x
    shape, rows = x.shape, x.contiguous().flatten()
    send, receive = [0] * parts, [0] * parts
    send[(here + by) % parts] = receive[(here - by) % parts] = rows.numel()
    pending = _start_exchange("shift", rows, send, receive, mesh, (axis,))
    return lambda: pending().view(shape)


def _start_exchange(
    kind: Kind, x: Tensor, send: Sequence[int], receive: Sequence[int], mesh: Mesh, axes: Axes
) -> Pending:
    if (ranks := mesh.group_size(*axes)) == 1:
        return lambda: x
    x = x.contiguous()
    arrived = x.new_empty((sum(receive), *x.shape[1:]))
    work = dist.all_to_all_single(
        arrived, x, list(receive), list(send), group=mesh.group(*axes), async_op=True
    )
    row = _nbytes(x) // x.size(0) if x.size(0) else 0
    here = mesh.coord[axes[0]] if len(axes) == 1 else mesh.ranks(*axes).index(mesh.rank)
    note_transfer(kind, "+".join(axes), ranks, _nbytes(x), (sum(send) - send[here]) * row)
    return _after(work, lambda: arrived, x)


def cut(x: Tensor, mesh: Mesh, axis: str, dim: int, *, uneven: bool = False) -> Tensor:
    """This rank's piece of an identical tensor; no communication."""
    if mesh.size[axis] == 1:
        return x
    return _pieces(x, mesh, axis, dim, uneven)[mesh.coord[axis]].contiguous()


def broadcast(x: Tensor, mesh: Mesh, axis: str, source: int) -> Tensor:
    """What the rank at coordinate ``source`` of ``axis`` holds; the others pass a tensor of the same
    shape.
    """
    if mesh.size[axis] == 1:
        return x
    return start_broadcast(x.clone(), mesh, axis, source, tuple(x.shape))()


def start_broadcast(x: Tensor, mesh: Mesh, axis: str, source: int, shape: tuple[int, ...]) -> Pending:
    """``x`` of the rank at ``source``, of ``shape``; the other ranks give only its dtype and device."""
    if mesh.size[axis] == 1:
        return lambda: x
    # .data: gloo copies a GPU's tensor back after sending it, and autograd would take that for a change of
    # what another operation has saved for its backward
    x = x.contiguous().data if mesh.coord[axis] == source else x.new_empty(shape)
    group = mesh.group(axis)
    work = dist.broadcast(x, src=dist.get_global_rank(group, source), group=group, async_op=True)
    _record("broadcast", mesh, axis, _nbytes(x))
    return _after(work, lambda: x)


def start_reduce(x: Tensor, mesh: Mesh, axis: str, target: int) -> Pending:
    """The sum over ``axis`` for the rank at coordinate ``target``; ``x`` is used up on all ranks."""
    if mesh.size[axis] == 1:
        return lambda: x
    x = x.contiguous()
    if _ordered(x):
        return start_all_reduce(x, mesh, axis)
    group = mesh.group(axis)
    work = dist.reduce(x, dst=dist.get_global_rank(group, target), group=group, async_op=True)
    _record("reduce", mesh, axis, _nbytes(x))
    return _after(work, lambda: x)


def _after(work: dist.Work | None, result: Pending, *inputs: Tensor) -> Pending:
    def wait() -> Tensor:
        if work is not None:
            work.wait()
        alive.clear()
        return result()

    alive = list(inputs)  # what is being sent must live until it has arrived
    return wait


def _pieces(x: Tensor, mesh: Mesh, axis: str, dim: int, uneven: bool) -> list[Tensor]:
    parts, size = mesh.size[axis], x.size(dim)
    if size % parts and not uneven:
        raise ValueError(
            f"dim {dim} of size {size} cannot be cut into {parts} equal parts by axis {axis!r}; choose a"
            f" multiple of {parts}"
        )
    return [x.narrow(dim, *piece(size, parts, i)) for i in range(parts)]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    if x.size(dim) == size:
        return x
    rest = list(x.shape)
    rest[dim] = size - x.size(dim)
    return torch.cat([x, x.new_zeros(rest)], dim)
