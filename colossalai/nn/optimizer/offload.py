"""Which slots hold the states of which parameter, and which of them rest on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from colossalai.nn.optimizer.base import local
from colossalai.nn.optimizer.slot_pipeline import SlotPipeline, slot_size
from colossalai.nn.optimizer.slots import Fields, Share, Slot, slots_for
from colossalai.utils.disk import Shelf


class Offload:
    """Slots for the states of parameters; ``fraction`` of their bytes rest on the disk."""

    def __init__(self, fraction: float, directory: str | os.PathLike[str] | None) -> None:
        self.share = Share(fraction)
        self.pipeline = SlotPipeline(Shelf(directory))
        self.slots: dict[Tensor, list[Slot]] = {}
        self.strides: dict[
            Tensor, tuple[int, ...]
        ] = {}  # of parameters: in which order slots hold their elements
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

        ``expected_bytes`` is the size of the states of all parameters, and decides once how large slots are.  Raises, with
        nothing changed, if the disk is full.
        """
        self._slot_bytes = self._slot_bytes or slot_size(expected_bytes)
        share = Share(self.share.fraction, self.share.total, self.share.on_disk)
        made: list[Slot] = []
        for parameters, fields in lists:
            for slot in slots_for(parameters, fields, self._slot_bytes, f"slot {self._made}."):
                slot.on_disk = share.wants(slot.nbytes)
                made.append(slot)
            self._made += 1
        self.pipeline.shelf.store.reserve(*(slot.nbytes for slot in made if slot.on_disk))
        self.pipeline.fit(made)
        self.share = share
        for slot in made:
            for extent in slot.extents:
                self.slots.setdefault(extent.parameter, []).append(slot)
                self.strides[extent.parameter] = local(extent.parameter).stride()

    def slots_of(self, parameters: Iterable[Tensor]) -> list[Slot]:
        """Each slot once, in the order in which they were made."""
        found = {slot.name: slot for parameter in parameters for slot in self.slots[parameter]}
        return list(found.values())

    def run(self, slots: Sequence[Slot], work: Callable[[Slot, Tensor], None]) -> None:
        """See ``SlotPipeline.run``; what could not be written is in memory, and raised at the end."""
        try:
            self.pipeline.run(slots, work)
        finally:
            self.pipeline.finish()
        if failures := self.pipeline.shelf.pop_failures():
            nbytes, first = sum(failure.nbytes for failure in failures), failures[0].error
            raise OSError(
                first.errno,
                f"{nbytes} bytes of optimizer states could not be written: {first.strerror}. Nothing is lost: the step is complete,"
                " and these states are kept in memory. Save a checkpoint; the next step tries to write them again",
            ) from first

    def clear(self) -> None:
        """Forget all states."""
        for slot in self.slots_of(self.slots):
            self.pipeline.forget(slot)
        self.slots.clear()
        self.strides.clear()
        self.share = Share(self.share.fraction)
