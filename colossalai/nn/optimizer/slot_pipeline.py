"""The pipeline in which states on a disk are updated: read, compute, write, each for another slot at the same time.

    disk     read 1   read 2   read 3 | write 1   read 4 | write 2   ...
    compute           slot 1   slot 2             slot 3             ...

A few buffers go round.  One run may follow another without a gap: what is expected next is read while the last slots of a run are computed,
and its last writes go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor

from colossalai.nn.optimizer.slots import Slot
from colossalai.utils.disk import Buffers, Pending, Shelf, aligned_empty

AHEAD = 2  # slots that are read while one is computed
WRITING = 2  # slots that may be on their way to the disk meanwhile
BUFFERS = AHEAD + 1 + WRITING
SHARE = 0.02  # of the bytes of all states: what the buffers may take together
LEAST, MOST = 1 << 16, 16 << 20  # bytes of a slot


def slot_size(expected_bytes: int) -> int:
    """How many bytes a slot has, at most, where all states have ``expected_bytes``."""
    return int(min(max(expected_bytes * SHARE / BUFFERS, LEAST), MOST))


class SlotPipeline:
    """Slots on a shelf, and the buffers through which they pass; used by one thread at a time."""

    def __init__(self, shelf: Shelf, buffers: Buffers | None = None) -> None:
        self.shelf, self.buffers = shelf, buffers or Buffers(BUFFERS)
        self._loading: dict[str, tuple[Tensor, Pending | None]] = {}
        self._expected: Sequence[Slot] = ()
        self._looked_at: tuple[Slot, Tensor] | None = None

    def fit(self, slots: Sequence[Slot]) -> None:
        """Let buffers be large enough for ``slots``."""
        self.buffers.fit(max((slot.nbytes for slot in slots if slot.on_disk), default=0))

    def forget(self, slot: Slot) -> None:
        """Give back the room of a slot whose states are elsewhere now."""
        self._looked_at = None
        self._cancel(slot.name)
        self.shelf.free(slot.name)

    def expect(self, slots: Sequence[Slot]) -> None:
        """These are next: begin to read them now, if nothing else is under way, or in the coming run."""
        self._expected = slots
        if not self._loading:
            for slot in slots[:AHEAD]:
                self._begin(slot, wait=False, must=False)

    def run(self, slots: Sequence[Slot], work: Callable[[Slot, Tensor], None]) -> None:
        """``work(slot, buffer)`` for each, which may change the states in the buffer, longer than the slot as it may be.

        A failed read ends it at once.  After failed writes it goes on, since the shelf keeps what could not be written.
        """
        self._looked_at = None
        names = {slot.name for slot in slots}
        queue = [*slots, *islice((s for s in self._expected if s.name not in names), AHEAD)]
        self._expected = ()
        try:
            for number, slot in enumerate(slots):
                self._begin(slot)
                for soon in queue[number + 1 : number + 1 + AHEAD]:
                    self._begin(soon, must=False)
                buffer = self._arrived(slot)
                work(slot, buffer)
                slot.is_filled = True
                self._put(slot, buffer)
        except BaseException:
            for name in list(self._loading):
                self._cancel(name)
            raise

    def finish(self) -> None:
        """Wait until everything is on the disk, or kept."""
        self.buffers.land_all()

    def look_at(self, slot: Slot) -> Tensor:
        """The states of a filled slot, to be read only; parameters that follow each other often share one."""
        if self._looked_at is None or self._looked_at[0] is not slot:
            self._looked_at = (slot, self._peek(slot))
        return self._looked_at[1]

    def look_away(self) -> None:
        """Give back the memory of the last look."""
        self._looked_at = None

    def _peek(self, slot: Slot) -> Tensor:
        if slot.memory is not None:
            return slot.memory
        buffer = aligned_empty(slot.nbytes)
        if (pending := self.shelf.read(slot.name, buffer)) is not None:
            pending.wait()
        return buffer

    def _begin(self, slot: Slot, *, wait: bool = True, must: bool = True) -> None:
        """Let the states of ``slot`` come to memory."""
        if slot.name in self._loading or slot.memory is not None:
            return
        if not slot.on_disk:
            slot.memory = aligned_empty(slot.nbytes)
            return
        buffer = self.buffers.get(wait=wait, must=must)
        if buffer is not None:
            pending = self.shelf.read(slot.name, buffer[: slot.nbytes]) if slot.is_filled else None
            self._loading[slot.name] = buffer, pending

    def _arrived(self, slot: Slot) -> Tensor:
        if slot.memory is not None:
            return slot.memory
        buffer, pending = self._loading[slot.name]
        if pending is not None:
            pending.wait()
        return buffer

    def _put(self, slot: Slot, buffer: Tensor) -> None:
        if slot.on_disk:
            del self._loading[slot.name]
            writing = self.shelf.write(slot.name, buffer[: slot.nbytes], slot.what)
            self.buffers.give(buffer, writing.finish)

    def _cancel(self, name: str) -> None:
        if name in self._loading:
            buffer, pending = self._loading.pop(name)
            if pending is not None:
                pending.settle()
            self.buffers.give(buffer)
