"""The pipeline in which states on a disk are updated: read, compute, write, each for another slot at the same time.

    disk     read 1   read 2   read 3 | write 1   read 4 | write 2   ...
    compute           slot 1   slot 2             slot 3             ...

A few buffers go round.  A buffer whose write failed is not given back: it is where the states are then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from colossalai.nn.optimizer.base import local
from colossalai.nn.optimizer.slots import GRAIN, Fields, Slot, cut
from colossalai.utils.disk import DiskStore, Pending, aligned_empty
from colossalai.utils.disk.memory import padded

AHEAD = 2  # slots that are read while one is computed
WRITING = 2  # slots that may be on their way to the disk meanwhile
BUFFERS = AHEAD + 1 + WRITING
SHARE = 0.02  # of the bytes of all states: what the buffers may take together
LEAST, MOST = 1 << 16, 16 << 20  # bytes of a slot


class SlotPipeline:
    """Slots on a disk, and the buffers through which they pass."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.store = DiskStore(directory)
        self._buffer_bytes = 0
        self._free: list[Tensor] = []
        self._writes: deque[tuple[Slot, Tensor, Pending]] = deque()
        self._failures: list[tuple[Slot, OSError]] = []

    def admit(self, slots: Sequence[Slot]) -> None:
        """Take room for new slots; raises, with nothing changed, if there is not enough."""
        sizes = [slot.nbytes for slot in slots if slot.on_disk]
        self.store.reserve(*sizes)
        if sizes and max(sizes) > self._buffer_bytes:
            self._buffer_bytes = padded(max(sizes))
            self._free.clear()

    def forget(self, slot: Slot) -> None:
        """Give back the room of a slot whose states are elsewhere now."""
        if slot.name in self.store:
            self.store.free(slot.name)

    def run(self, slots: Sequence[Slot], work: Callable[[Slot, Tensor], None]) -> None:
        """``work(slot, buffer)`` for each, which may change the states in the buffer.

        A failed read ends it at once.  After failed writes it goes on to the end, with the states in memory, and raises then.
        """
        loading: deque[tuple[Tensor, Pending | None]] = deque()
        started = 0
        try:
            for number, slot in enumerate(slots):
                while started < min(number + 1 + AHEAD, len(slots)):
                    loading.append(self._load(slots[started]))
                    started += 1
                buffer, pending = loading[0]
                if pending is not None:
                    pending.wait()
                loading.popleft()
                work(slot, buffer)
                slot.is_filled = True
                self._put(slot, buffer)
        finally:
            for _, pending in loading:
                if pending is not None:
                    pending.settle()
            while self._writes:
                self._finish_write()
        self._raise_failures()

    def peek(self, slot: Slot) -> Tensor:
        """The states of a filled slot, to be read only."""
        if slot.memory is not None:
            return slot.memory
        buffer = aligned_empty(slot.nbytes)
        self.store.read(slot.name, buffer).wait()
        return buffer

    def _load(self, slot: Slot) -> tuple[Tensor, Pending | None]:
        """A buffer, and what must be waited for until it holds the slot; it may be longer than the slot."""
        if slot.memory is not None:
            return slot.memory, None
        if not slot.on_disk:
            slot.memory = aligned_empty(slot.nbytes)
            return slot.memory, None
        buffer = self._free.pop() if self._free else aligned_empty(self._buffer_bytes)
        if not slot.is_filled:
            return buffer, None
        return buffer, self.store.read(slot.name, buffer[: slot.nbytes])

    def _put(self, slot: Slot, buffer: Tensor) -> None:
        if not slot.on_disk:
            return
        slot.memory = buffer  # until it is on the disk
        try:
            pending = self.store.write(slot.name, buffer[: slot.nbytes])
        except OSError as error:
            self._failures.append((slot, error))
            return
        self._writes.append((slot, buffer, pending))
        while len(self._writes) > WRITING:
            self._finish_write()

    def _finish_write(self) -> None:
        slot, buffer, pending = self._writes.popleft()
        try:
            pending.wait()
        except OSError as error:
            self._failures.append((slot, error))
            return
        slot.memory = None
        if buffer.nbytes == self._buffer_bytes:
            self._free.append(buffer)

    def _raise_failures(self) -> None:
        failures, self._failures = self._failures, []
        if not failures:
            return
        nbytes = sum(slot.nbytes for slot, _ in failures)
        first = failures[0][1]
        raise OSError(
            first.errno,
            f"{nbytes} bytes of optimizer states could not be written: {first.strerror}. Nothing is lost: the step is complete,"
            " and these states are kept in memory. Save a checkpoint; the next step tries to write them again",
        ) from first


class Offload:
    """Which slots hold the states of which parameter; ``fraction`` of their bytes rest on the disk."""

    def __init__(self, fraction: float, directory: str | os.PathLike[str] | None) -> None:
        self.fraction = fraction
        self.pipeline = SlotPipeline(directory)
        self.slots: dict[Tensor, list[Slot]] = {}
        self.strides: dict[
            Tensor, tuple[int, ...]
        ] = {}  # of parameters: in which order slots hold their elements
        self.total_bytes = self.disk_bytes = 0
        self._slot_bytes = 0
        self._made = 0
        self._looked_at: tuple[Slot, Tensor] | None = None

    def place(self, lists: Iterable[tuple[list[Tensor], Fields]], expected_bytes: int) -> None:
        """Slots for new parameters; the parameters of one list have the same fields.

        ``expected_bytes`` is the size of the states of all parameters, and decides once how large slots are.  Raises, with
        nothing changed, if the disk is full.
        """
        if not self._slot_bytes:
            self._slot_bytes = int(min(max(expected_bytes * SHARE / BUFFERS, LEAST), MOST))
        total, disk = self.total_bytes, self.disk_bytes
        made: list[Slot] = []
        for parameters, fields in lists:
            numel = self._slot_bytes // sum(dtype.itemsize for _, dtype in fields)
            for extents in cut(parameters, max(numel - numel % GRAIN, GRAIN)):
                slot = Slot(f"slot {self._made + len(made)}", extents, fields)
                total += slot.nbytes
                slot.on_disk = disk + slot.nbytes / 2 <= self.fraction * total
                disk += slot.nbytes if slot.on_disk else 0
                made.append(slot)
        self.pipeline.admit(made)
        self.total_bytes, self.disk_bytes, self._made = total, disk, self._made + len(made)
        for slot in made:
            for extent in slot.extents:
                self.slots.setdefault(extent.parameter, []).append(slot)
                self.strides[extent.parameter] = local(extent.parameter).stride()

    def slots_of(self, parameters: Iterable[Tensor]) -> list[Slot]:
        """Each slot once, in the order in which they were made."""
        found = {slot.name: slot for parameter in parameters for slot in self.slots[parameter]}
        return list(found.values())

    def run(self, slots: Sequence[Slot], work: Callable[[Slot, Tensor], None]) -> None:
        """See ``SlotPipeline.run``."""
        self._looked_at = None
        self.pipeline.run(slots, work)

    def look_at(self, slot: Slot) -> Tensor:
        """The states of a filled slot, to be read only; parameters that follow each other often share one."""
        if self._looked_at is None or self._looked_at[0] is not slot:
            self._looked_at = (slot, self.pipeline.peek(slot))
        return self._looked_at[1]

    def look_away(self) -> None:
        """Give back the memory of the last look."""
        self._looked_at = None

    def clear(self) -> None:
        """Forget all states."""
        for slot in self.slots_of(self.slots):
            self.pipeline.forget(slot)
        self.slots.clear()
        self.strides.clear()
        self.total_bytes = self.disk_bytes = 0
        self._looked_at = None
