"""A process group whose ranks meet in shared memory, for grids of tiny models.

Four ranks on two cores need 3 to 5 ms for a message by gloo, whatever its size, and a hundred steps of a tiny
model under Gemini are ten thousand messages.  Here one takes a twentieth of that.  Grids of many steps, which
nobody could wait for, run over this; all else runs over gloo.

[Note: a ring] A group is a file of ``RING`` rows with a cell for every rank.  A collective has a number: its
row is that number modulo ``RING``.  A rank writes what it brings into its cell and says that it has arrived;
whoever sees that all have arrived reads the row, and says so.  A row is written again when all have read it.
So a collective begins without waiting, as gloo's do, and ends in ``wait``.

[Note: progress] Ranks may begin collectives of two groups in different orders.  Whoever waits for one
therefore ends all others that can be ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "shared_memory"
RING, CELL = 8, 1 << 16
SPINS = 2000  # looks at a counter before a rank sleeps between them

_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda rows: rows.sum(0)),
    (dist.ReduceOp.MAX, lambda rows: rows.amax(0)),
    (dist.ReduceOp.MIN, lambda rows: rows.amin(0)),
    (dist.ReduceOp.PRODUCT, lambda rows: rows.prod(0)),
)


def register() -> None:
    """Let ``launch(..., backend=NAME)`` and ``init_process_group`` know these groups; again does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> SharedMemoryGroup:
    if rank == 0:
        handle, path = tempfile.mkstemp(prefix="colossalai_ring_", dir="/dev/shm")
        os.ftruncate(handle, 16 * size + RING * size * CELL)
        os.close(handle)
        store.set("ring", path)
    path = store.get("ring").decode()
    group = SharedMemoryGroup(rank, size, path, timeout.total_seconds())
    store.add("opened", 1)
    if rank == 0:
        deadline = time.monotonic() + timeout.total_seconds()
        while store.add("opened", 0) < size and time.monotonic() < deadline:
            os.sched_yield()
        os.unlink(path)  # nothing is left behind, however the ranks end
    return group


class _Work(dist._Work):  # type: ignore[name-defined, misc]
    """A collective that has begun; ``end`` reads the row."""

    def __init__(self, group: SharedMemoryGroup, number: int, end: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self.group, self.number, self.end, self.done = group, number, end, False

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.group.wait_until(lambda: self.done)
        return True

    def is_completed(self) -> bool:
        _progress()
        return self.done

    def is_success(self) -> bool:
        return self.done


class SharedMemoryGroup(dist.ProcessGroup):
    """The ranks of one host that have opened ``path``, see [Note: a ring]; collectives of CPU tensors, no
    messages between two.
    """

    def __init__(self, rank: int, size: int, path: str, timeout: float) -> None:
        super().__init__(rank, size)
        self.me, self.ranks, self.timeout = rank, size, timeout
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        counters = memoryview(self._map)[: 16 * size].cast("Q")
        self._arrived, self._read = counters[:size], counters[size:]
        self._rows = torch.frombuffer(self._map, dtype=torch.uint8, offset=16 * size).view(RING, size, CELL)
        self._next = 0
        self._begun: deque[_Work] = deque()
        _groups.append(self)

    # What torch asks

    def size(self) -> int:
        return self.ranks

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    # The ring

    def begin(self, brings: Tensor | None, end: Callable[[list[Tensor]], None]) -> _Work:
        """Bring bytes, at most ``CELL``; ``end`` gets the cells of all ranks."""
        number, self._next = self._next, self._next + 1
        if number >= RING:
            self.wait_until(lambda: min(self._read) > number - RING)
        if brings is not None:
            self._rows[number % RING, self.me, : brings.numel()] = brings
        self._arrived[self.me] = number + 1
        work = _Work(self, number, end)
        self._begun.append(work)
        return work

    def advance(self) -> None:
        """End what can be ended, in order."""
        while self._begun and min(self._arrived) > self._begun[0].number:
            work = self._begun.popleft()
            work.end(list(self._rows[work.number % RING]))
            self._read[self.me] = work.number + 1
            work.done = True

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        spins, deadline = 0, time.monotonic() + self.timeout
        while True:
            _progress()
            if is_so():
                return
            spins += 1
            if spins < SPINS:
                os.sched_yield()
                continue
            time.sleep(1e-4)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.me} has waited {self.timeout:.0f} s; the ranks have arrived at"
                    f" {list(self._arrived)}"
                )

    def _exchange(self, brings: Tensor | None, nbytes: int, end: Callable[[list[Tensor]], None]) -> _Work:
        """``end`` gets the ``nbytes`` of all ranks; what is too long for a cell goes in pieces, and is waited
        for.
        """
        own = None if brings is None else _bytes(brings)
        if nbytes <= CELL:
            return self.begin(own, lambda cells: end([c[:nbytes] for c in cells]))
        whole = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(self.ranks)]
        work = None
        for at in range(0, nbytes, CELL):
            until = min(at + CELL, nbytes)

            def keep(cells: list[Tensor], at: int = at, until: int = until) -> None:
                for target, cell in zip(whole, cells, strict=True):
                    target[at:until] = cell[: until - at]

            work = self.begin(None if own is None else own[at:until], keep)
            work.wait()
        assert work is not None
        end(whole)
        return work

    # Collectives

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        (tensor,) = tensors

        def end(cells: list[Tensor]) -> None:
            tensor.copy_(_reduced(cells, tensor, opts).view(tensor.shape))

        return self._exchange(tensor, tensor.nbytes, end)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> _Work:
        (tensor,) = tensors

        def end(cells: list[Tensor]) -> None:
            if self.me == opts.rootRank:
                tensor.copy_(_reduced(cells, tensor, opts).view(tensor.shape))

        return self._exchange(tensor, tensor.nbytes, end)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> _Work:
        (tensor,) = tensors
        is_root = self.me == opts.rootRank

        def end(cells: list[Tensor]) -> None:
            if not is_root:
                tensor.copy_(_as(cells[opts.rootRank], tensor).view(tensor.shape))

        return self._exchange(tensor if is_root else None, tensor.nbytes, end)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        (output,), (own,) = outputs, inputs

        def end(cells: list[Tensor]) -> None:
            for target, cell in zip(output, cells, strict=True):
                target.copy_(_as(cell, own).view(target.shape))

        return self._exchange(own, own.nbytes, end)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        return self.allgather([output.view(-1).chunk(self.ranks)], [own.reshape(-1)], opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any) -> _Work:
        part = slice(self.me * output.nbytes, (self.me + 1) * output.nbytes)

        def end(cells: list[Tensor]) -> None:
            output.copy_(_reduced([c[part] for c in cells], output, opts).view(output.shape))

        return self._exchange(whole, whole.nbytes, end)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # until torch 2.12

    def barrier(self, opts: Any = None) -> _Work:
        return self.begin(None, lambda cells: None)


_groups: list[SharedMemoryGroup] = []


def _progress() -> None:
    for group in _groups:
        if group._begun:
            group.advance()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _as(cell: Tensor, like: Tensor) -> Tensor:
    return cell.clone().view(like.dtype)  # a part of a cell may begin anywhere


def _reduced(cells: list[Tensor], like: Tensor, opts: Any) -> Tensor:
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for known, reduction in _REDUCTIONS:
        if op == known:
            return reduction(torch.stack(cells).view(like.dtype)).to(like.dtype)
    raise ValueError(f"{NAME} has no reduction {op}")
