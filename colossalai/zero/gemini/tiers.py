"""Memory tiers: the places where model data may lie, each with a capacity, and the copies between them.

``compute`` is where modules run, ``host`` is the memory of the machine, ``disk`` takes what does not fit
there.  Every byte of model data is reserved in a tier before it is allocated and released when it is freed,
so a tier knows what it holds and refuses what would go beyond its capacity.  A machine without GPU has the
same tiers: compute and host are host memory then, and the user gives the capacity of ``compute``.

Copies are asynchronous where there is a GPU: each direction has a stream of its own, host memory is pinned,
and the CPU does not wait.  A ``PendingCopy`` is a copy on its way; without a GPU it is done when it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossalai.utils.memory.byte_count import ByteCount
from colossalai.utils.memory.host_memory import host_empty

UNLIMITED = 1 << 62


class OutOfCapacity(RuntimeError):
    """A tier cannot take what is needed at the same time."""


def check_capacity(tier: str, capacity: Any) -> None:
    """Refuse a capacity that is not a number of bytes."""
    if capacity is not None and not (isinstance(capacity, int | float) and capacity > 0):
        raise ValueError(
            f"{tier}_capacity is a number of bytes above 0, or None for as much as there is; got {capacity!r}"
        )


@dataclass
class Tier:
    """A place for model data; ``capacity`` in bytes, None for as much as there is."""

    name: str
    device: torch.device
    capacity: int | None = None
    pinned: bool = False  # page-locked: a GPU copies from and to it without the CPU
    below: Tier | None = None  # the tier that takes what does not fit here
    reclaim: Callable[[], None] | None = None  # frees memory that is used for speed only
    count: ByteCount = field(default_factory=ByteCount, repr=False)  # of the disk: its store's

    def __post_init__(self) -> None:
        check_capacity(self.name, self.capacity)
        self.count.capacity = self.capacity

    @property
    def used(self) -> int:
        return self.count.used

    @property
    def peak(self) -> int:
        return self.count.peak

    @property
    def limit(self) -> int:
        return UNLIMITED if self.capacity is None else self.capacity

    @property
    def free(self) -> int:
        return self.limit - self.used

    def reserve(self, nbytes: int, what: str) -> None:
        """Count ``nbytes`` for ``what``, which is about to be allocated."""
        if self.count.take(nbytes):
            return
        if self.reclaim is not None:
            self.reclaim()
            if self.count.take(nbytes):
                return
        raise self.no_room(nbytes, what)

    def no_room(self, nbytes: int, what: str) -> OutOfCapacity:
        """Return the error that ``nbytes`` more for ``what`` do not fit here."""
        return OutOfCapacity(
            f"{self} and has no room for {what}"
            f" ({nbytes:,} bytes){self._elsewhere()}; give the tier more capacity, use smaller chunks"
            " (min_chunk_size_mb, search_range_mb), or let more of the model rest elsewhere"
            " (placement_policy)"
        )

    def _elsewhere(self) -> str:
        if self.below is None:
            return ""
        return f"; {self.below}"

    def __str__(self) -> str:
        most = f"{self.capacity:,} bytes" if self.capacity is not None else "any number of bytes"
        return f"the {self.name} tier holds {self.used:,} of {most}"

    def release(self, nbytes: int) -> None:
        """Count ``nbytes`` as free again."""
        self.count.take(-nbytes)

    def empty(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Allocate a flat tensor in this tier; the caller gives its bytes back when it drops the tensor."""
        self.reserve(numel * dtype.itemsize, what)
        if self.pinned:
            return host_empty(numel, dtype, pinned=True)
        return torch.empty(numel, dtype=dtype, device=self.device)


def nowhere(tiers: Sequence[Tier], what: str, nbytes: int) -> OutOfCapacity:
    """Return the error for something that fits into none of ``tiers``."""
    full = "; ".join(map(str, tiers))
    return OutOfCapacity(
        f"no tier has room for {what} ({nbytes:,} bytes): {full}. Give one of them more capacity"
        " (host_capacity, disk_capacity), or use smaller chunks (min_chunk_size_mb, search_range_mb)"
    )


@dataclass
class PendingCopy:
    """A copy that may still be on its way; ``keep`` are tensors that must live until it is done."""

    event: Any = None
    work: Any = None  # a collective that follows the copy
    keep: list[Tensor] = field(default_factory=list)
    needed: Any = None  # records when the current stream began to wait for the copy, if copies are timed

    def wait(self) -> None:
        """Let the current stream wait for the copy; the CPU goes on."""
        if self.needed is not None:
            self.needed.record()
        if self.work is not None:
            self.work.wait()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.keep.clear()

    def finish(self) -> None:
        """Wait on the CPU until the copy is done."""
        if self.event is not None:
            self.event.synchronize()
        self.keep.clear()


class Copier:
    """Starts copies between host and compute device, with one stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        self.upload: Any = torch.cuda.Stream(device) if self.is_async else None
        self.download: Any = torch.cuda.Stream(device) if self.is_async else None
        self.timed = False  # measure copies, and how long computation waits for them
        self._measured: list[tuple[Any, Any, Any]] = []

    def start(self, target: Tensor, source: Tensor) -> PendingCopy:
        """Start a copy, after everything that the current stream was given before."""
        if not self.is_async:
            target.copy_(source)
            return PendingCopy()
        stream = self.download if target.device.type == "cpu" else self.upload
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begin, needed = (
            (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self.timed else (None, None)
        )
        with torch.cuda.stream(stream):
            if begin is not None:
                begin.record(stream)
            target.copy_(source, non_blocking=True)
            # blocking: a thread of the CPU that waits sleeps
            event = torch.cuda.Event(blocking=True, enable_timing=self.timed)
            event.record(stream)
        if begin is not None:
            self._measured.append((begin, event, needed))
        return PendingCopy(event, keep=[target, source], needed=needed)

    def times(self) -> tuple[float, float]:
        """Return the seconds of all copies since the last call, and those that computation waited for them;
        zeros if not timed.
        """
        measured, self._measured = self._measured, []
        copying = waiting = 0.0
        if measured:
            torch.cuda.synchronize(self.device)
        for begin, end, needed in measured:
            copying += begin.elapsed_time(end) / 1000
            if needed.query() and needed.cuda_event:
                waiting += max(0.0, needed.elapsed_time(end)) / 1000
        return copying, waiting
