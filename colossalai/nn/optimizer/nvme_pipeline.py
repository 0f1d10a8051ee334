"""Optimizer states on a disk: the slots that they lie in, and the pipeline that updates them.

A slot holds the states of a part of a large parameter, or of several small ones:  an *extent* is the part
[start, stop) of a parameter in the order of its memory, and a slot is a row of bytes with one run of elements
for each state, in which the extents follow each other.  So one transfer moves all states that are updated
together, whatever the shapes of the parameters.  ``SlotPipeline`` reads, computes and writes, each for
another slot at the same time:

    disk     read 1   read 2   read 3 | write 1   read 4 | write 2   ...
    compute           slot 1   slot 2             slot 3             ...

A few buffers go round.  One run may follow another without a gap: the slots that are expected next are read
while the last slots of a run are computed, and the last writes of the run go on.

``NVMeOptimizer`` uses this for parameters on the CPU (``Offload``), and Gemini for chunks on its disk tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from colossalai._numeric import round_up
from colossalai.kernel.optimizer.split import tail_of
from colossalai.nn.optimizer.base import local
from colossalai.utils.disk import Buffers, Pending, Shelf, aligned_empty

Fields = Sequence[tuple[str, torch.dtype]]  # the states of a parameter
Part = tuple["Extent", dict[str, Tensor]]  # a part of a parameter, with its states

# parameters are cut at multiples of it, so that vectorized kernels treat each element as they would uncut
GRAIN = 1024
RUN = 64  # bytes: runs of elements begin at multiples of it


AHEAD = 2  # slots that are read while one is computed
WRITING = 2  # slots that may be on their way to the disk meanwhile
BUFFERS = AHEAD + 1 + WRITING
SHARE = 0.02  # of the bytes of all states: what the buffers may take together
LEAST, MOST = 1 << 16, 16 << 20  # bytes of a slot


@dataclass(frozen=True)
class Extent:
    parameter: Tensor
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, row: Tensor) -> Tensor:
        """This part of a row of all elements."""
        return row[self.start : self.stop]


class StateSlot:
    """The states ``fields`` of some extents.

    Before it is filled for the first time its states are those that the optimizer holds elsewhere, or start
    values. Afterwards they are in ``memory``, or, where this is None, on the disk.
    """

    def __init__(
        self, name: str, extents: Sequence[Extent], fields: Fields, what: str = "optimizer states"
    ) -> None:
        self.name, self.what = name, what
        self.extents = tuple(extents)
        self.numel = sum(extent.numel for extent in extents)
        self.on_disk = True  # where it rests
        self.is_filled = False
        self.memory: Tensor | None = None
        self.set_fields(fields)

    def set_fields(self, fields: Fields) -> None:
        """Have a run for each of ``fields``; those that were there before and
        come first stay where they are.
        """
        self.fields = tuple(fields)
        self._runs: dict[str, tuple[int, torch.dtype]] = {}
        self.nbytes = 0
        for field, dtype in fields:
            self._runs[field] = (self.nbytes, dtype)
            self.nbytes += round_up(self.numel * dtype.itemsize, RUN)

    def has(self, field: str) -> bool:
        return field in self._runs

    def states(self, buffer: Tensor) -> Iterator[Part]:
        """Each extent with its states, as views of ``buffer``."""
        runs = {
            field: buffer[begin : begin + self.numel * dtype.itemsize].view(dtype)
            for field, (begin, dtype) in self._runs.items()
        }
        position = 0
        for extent in self.extents:
            part = slice(position, position + extent.numel)
            yield extent, {field: run[part] for field, run in runs.items()}
            position = part.stop


@dataclass
class DiskShare:
    """Lets ``fraction`` of the bytes rest on the disk, spread evenly."""

    fraction: float
    total: int = 0
    on_disk: int = 0

    def wants(self, nbytes: int) -> bool:
        """Whether the next ``nbytes`` go there."""
        self.total += nbytes
        wanted = self.on_disk + nbytes / 2 <= self.fraction * self.total
        self.on_disk += nbytes * wanted
        return wanted


def slots_for(
    parameters: Iterable[Tensor],
    fields: Fields,
    nbytes: int,
    name: str,
    what: str = "optimizer states",
    whole: bool = False,
) -> list[StateSlot]:
    """Slots of at most ``nbytes`` for parameters with the same fields.

    Each of its own if it must stay ``whole``.
    """
    numel = nbytes // max(sum(dtype.itemsize for _, dtype in fields), 1)
    parts: Iterable[list[Extent]] = cut(parameters, max(numel - numel % GRAIN, GRAIN))
    if whole:
        parts = ([Extent(p, 0, p.numel())] for p in parameters)
    return [StateSlot(f"{name}{n}", extents, fields, what) for n, extents in enumerate(parts)]


def begin(states: Mapping[str, Tensor], known: Mapping[str, Tensor], weight: Tensor) -> None:
    """Fill the states of an extent for the first time: with those that are ``known``, or start values."""
    for name, state in states.items():
        if name == "tail":
            state.copy_(tail_of(known["master"], weight)) if "master" in known else state.zero_()
        elif name in known:
            state.copy_(known[name])
        elif name == "master":
            state.copy_(weight)
        else:
            state.zero_()


def cut(parameters: Iterable[Tensor], numel: int) -> Iterator[list[Extent]]:
    """The parameters in lists of extents with at most ``numel`` elements together."""
    found: list[Extent] = []
    room = numel
    for parameter in parameters:
        start, end = 0, parameter.numel()
        while start < end:
            size = min(room, end - start)
            if start + size < end:
                size -= size % GRAIN
            if size:
                found.append(Extent(parameter, start, start + size))
            start += size
            room -= size
            if start < end or not room:
                yield found
                found, room = [], numel
    if found:
        yield found


def slot_size(expected_bytes: int) -> int:
    """How many bytes a slot has, at most, where all states have ``expected_bytes``."""
    return int(min(max(expected_bytes * SHARE / BUFFERS, LEAST), MOST))


class SlotPipeline:
    """Slots on a shelf, and the buffers through which they pass; used by one thread at a time."""

    def __init__(self, shelf: Shelf, buffers: Buffers | None = None) -> None:
        self.shelf, self.buffers = shelf, buffers or Buffers(BUFFERS)
        self._loading: dict[str, tuple[Tensor, Pending | None]] = {}
        self._expected: Sequence[StateSlot] = ()
        self._looked_at: tuple[StateSlot, Tensor] | None = None

    def fit(self, slots: Sequence[StateSlot]) -> None:
        """Let buffers be large enough for ``slots``."""
        self.buffers.fit(max((slot.nbytes for slot in slots if slot.on_disk), default=0))

    def forget(self, slot: StateSlot) -> None:
        """Give back the room of a slot whose states are elsewhere now."""
        self._looked_at = None
        self._cancel(slot.name)
        self.shelf.free(slot.name)

    def expect(self, slots: Sequence[StateSlot]) -> None:
        """These are next: begin to read them now, if nothing else is under way, or in the coming run."""
        self._expected = slots
        if not self._loading:
            for slot in slots[:AHEAD]:
                self._begin(slot, wait=False, must=False)

    def run(self, slots: Sequence[StateSlot], work: Callable[[StateSlot, Tensor], None]) -> None:
        """``work(slot, buffer)`` for each, which may change the states in the
        buffer, longer than the slot as it may be.

        A failed read ends it at once.  After failed writes it goes on, since
        the shelf keeps what could not be written.
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

    def look_at(self, slot: StateSlot) -> Tensor:
        """The states of a filled slot, to be read only; parameters that follow each other often share one."""
        if self._looked_at is None or self._looked_at[0] is not slot:
            self._looked_at = (slot, self._peek(slot))
        return self._looked_at[1]

    def look_away(self) -> None:
        """Give back the memory of the last look."""
        self._looked_at = None

    def _peek(self, slot: StateSlot) -> Tensor:
        if slot.memory is not None:
            return slot.memory
        buffer = aligned_empty(slot.nbytes)
        if (pending := self.shelf.read(slot.name, buffer)) is not None:
            pending.wait()
        return buffer

    def _begin(self, slot: StateSlot, *, wait: bool = True, must: bool = True) -> None:
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

    def _arrived(self, slot: StateSlot) -> Tensor:
        if slot.memory is not None:
            return slot.memory
        buffer, pending = self._loading[slot.name]
        if pending is not None:
            pending.wait()
        return buffer

    def _put(self, slot: StateSlot, buffer: Tensor) -> None:
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


class SlotTable:
    """Says which slots hold the states of which parameter, and reads them."""

    def __init__(self, pipeline: SlotPipeline) -> None:
        self.pipeline = pipeline
        self.slots: dict[Tensor, list[StateSlot]] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self.slots

    def add(self, slots: Iterable[StateSlot]) -> None:
        for slot in slots:
            for extent in slot.extents:
                self.slots.setdefault(extent.parameter, []).append(slot)

    def slots_of(self, parameters: Iterable[Tensor]) -> list[StateSlot]:
        """The slots of ``parameters``, each once, in the order in which they were made."""
        found = {slot.name: slot for parameter in parameters for slot in self.slots.get(parameter, ())}
        return list(found.values())

    def read(
        self,
        parameter: Tensor,
        parts_of: Callable[[StateSlot], Iterable[Part]],
        complete: Callable[[StateSlot, Extent, dict[str, Tensor]], None],
    ) -> dict[str, Tensor]:
        """Put the states of ``parameter`` together, each as a row of all elements.

        Args:
            parts_of: gives the extents of a slot with their states.
            complete: changes the states of an extent to what is to be read, such as a tail to a master.
        """
        found: dict[str, Tensor] = {}
        for slot in self.slots[parameter]:
            for extent, states in parts_of(slot):
                if extent.parameter is not parameter:
                    continue
                complete(slot, extent, states)
                for name, state in states.items():
                    if name not in found:
                        found[name] = torch.empty(local(parameter).numel(), dtype=state.dtype)
                    extent.of(found[name]).copy_(state)
        return found

    def forget(self) -> None:
        """Give back the room of all slots."""
        for slot in self.slots_of(self.slots):
            self.pipeline.forget(slot)
        self.slots.clear()


class Offload(SlotTable):
    """Makes slots for the states of parameters; ``fraction`` of their bytes rest on the disk."""

    def __init__(self, fraction: float, directory: str | os.PathLike[str] | None) -> None:
        super().__init__(SlotPipeline(Shelf(directory)))
        self.share = DiskShare(fraction)
        # of parameters: in which order slots hold their elements
        self.strides: dict[Tensor, tuple[int, ...]] = {}
        self._slot_bytes = 0
        self._made = 0

    @property
    def total_bytes(self) -> int:
        return self.share.total

    @property
    def disk_bytes(self) -> int:
        return self.share.on_disk

    def place(self, lists: Iterable[tuple[list[Tensor], Fields]], expected_bytes: int) -> None:
        """Slots for new parameters; the parameters of one list have the same fields.

        ``expected_bytes`` is the size of the states of all parameters, and decides once how
        large slots are.  Raises, with nothing changed, if the disk is full.
        """
        self._slot_bytes = self._slot_bytes or slot_size(expected_bytes)
        share = DiskShare(self.share.fraction, self.share.total, self.share.on_disk)
        made: list[StateSlot] = []
        for parameters, fields in lists:
            for slot in slots_for(parameters, fields, self._slot_bytes, f"slot {self._made}."):
                slot.on_disk = share.wants(slot.nbytes)
                made.append(slot)
            self._made += 1
        self.pipeline.shelf.store.reserve(*(slot.nbytes for slot in made if slot.on_disk))
        self.pipeline.fit(made)
        self.share = share
        self.add(made)
        for slot in made:
            for extent in slot.extents:
                self.strides[extent.parameter] = local(extent.parameter).stride()

    def run(self, slots: Sequence[StateSlot], work: Callable[[StateSlot, Tensor], None]) -> None:
        """See ``SlotPipeline.run``; what could not be written is in memory, and raised at the end."""
        try:
            self.pipeline.run(slots, work)
        finally:
            self.pipeline.finish()
        if failures := self.pipeline.shelf.pop_failures():
            nbytes, first = sum(failure.nbytes for failure in failures), failures[0].error
            raise OSError(
                first.errno,
                f"{nbytes} bytes of optimizer states could not be written: {first.strerror}. Nothing is"
                " lost: the step is complete, and these states are kept in memory. Save a checkpoint; the"
                " next step tries to write them again",
            ) from first

    def clear(self) -> None:
        """Forget all states."""
        self.forget()
        self.strides.clear()
        self.share = DiskShare(self.share.fraction)
