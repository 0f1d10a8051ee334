"""Gradients of weights that several pipeline stages hold together, such as an embedding that is also the head.

Those of other stages must be added before the ranks average, after all micro-batches.  So the backward pass leaves them where it makes
them, in ``param.grad``; whoever runs the pipeline adds them up over the stages there (``colossalai.pipeline.tied``), and the step
sends them to the homes of their chunks like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from colossalai.mesh.parameter import SHARED_GROUP, own_grad, set_own_grad
from colossalai.zero.gemini.chunk import Chunk, Slot
from colossalai.zero.gemini.tiers import Tier


class SharedGradients:
    """The parameters of a model that other stages hold too, and the memory of their gradients on the compute tier."""

    def __init__(self, compute: Tier, make_room: Callable[[int, str], None]) -> None:
        self._compute, self._make_room = compute, make_room
        self.slots: dict[Slot, Chunk] = {}
        self._counted: set[Slot] = set()

    def find(self, chunks: Iterable[Chunk]) -> None:
        """Take the shared parameters among those of ``chunks``."""
        self.slots = {
            s: chunk for chunk in chunks for s in chunk.slots if s.trained and hasattr(s.param, SHARED_GROUP)
        }

    def has(self, chunk: Chunk) -> bool:
        """Whether ``chunk`` holds a shared parameter."""
        return chunk in self.slots.values()

    def has_any(self) -> bool:
        """Whether a gradient waits for the step."""
        return any(own_grad(slot.param) is not None for slot in self.slots)

    def keep(self, slot: Slot) -> None:
        """The backward pass has left a gradient in ``slot.param.grad``: count its memory once."""
        if slot not in self._counted:
            nbytes, what = self._nbytes(slot), f"the gradient of {slot.name}"
            self._make_room(nbytes, what)
            self._compute.take(nbytes, what)
            self._counted.add(slot)

    def release(self) -> Iterator[tuple[Chunk, Slot]]:
        """Yield every shared parameter that has a gradient, which is from then on in the account of whoever takes it."""
        for slot, chunk in self.slots.items():
            if slot in self._counted:
                self._counted.discard(slot)
                self._compute.give(self._nbytes(slot))
            if own_grad(slot.param) is not None:
                yield chunk, slot

    def clear(self) -> None:
        """Forget all of these gradients."""
        for _, slot in self.release():
            set_own_grad(slot.param, None)

    def _nbytes(self, slot: Slot) -> int:
        return slot.numel * self.slots[slot].dtype.itemsize
