"""Optimizer states, and weights, of chunks that rest on the disk: how an update gets at them.

States lie in slots (see ``colossalai.nn.optimizer.nvme_pipeline``) and stream through a few buffers of one
size, however large the chunks are: while one slot is updated, the next are read and those before are written,
also from one chunk to the next.  Weights that rest on the disk are read as a whole, since they are one row
that modules need too.

While states are on the disk, ``optim.state`` has tensors with a shape and a dtype whose values are read when
they are asked for (``colossalai.utils.lazy_tensor``), and weights show NaN.

[Note: masters that wait]
A checkpoint holds the float32 weights of bfloat16 parameters, of which our optimizers keep only the digits
that the parameter lacks.  The model may be loaded after its optimizer, so a loaded master stays as it is
until the next update, which takes the digits from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai.kernel.optimizer.lists import row
from colossalai.kernel.optimizer.split import join, tail_of
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.nn.optimizer.nvme_pipeline import (
    BUFFERS,
    DiskShare,
    Extent,
    Part,
    SlotPipeline,
    SlotTable,
    StateSlot,
    begin,
    slot_size,
    slots_for,
)
from colossalai.utils.disk import Buffers, Pending
from colossalai.utils.lazy_tensor import fetched, is_lazy, lazy_tensor
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_manager import ChunkManager
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.disk_tier import UPDATES, TierMemory, largest_slot, weights_of
from colossalai.zero.gemini.optimizer_states import MASTER, ChunkPieces, StateKinds, is_large
from colossalai.zero.gemini.shadow_optimizer import ShadowOptimizer, group_options, stateless_copy
from colossalai.zero.gemini.tiers import OutOfCapacity, nowhere
from colossalai.zero.pieces import Piece, is_elementwise
from colossalai.zero.sharded import needs_masters


@dataclass(frozen=True)
class StatePart:
    """A part of a piece in an update: its ``states``, and whether these surely belong to its weights."""

    piece: Piece
    extent: Extent
    states: dict[str, Tensor]
    is_in_line: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of the piece if the part is all of it, else that of a row."""
        numel = self.extent.numel
        return self.piece.value.shape if numel == self.piece.value.numel() else torch.Size([numel])


Work = Callable[[list[StatePart]], None]


class DiskStates:
    """Keeps states, and weights, of an optimizer over chunks on the disk, and lends them to updates.

    ``pieces_of`` gives the pieces of a chunk that are not empty.  With ``share``, that share of all states is
    to rest there; without, the states for which the host has no room.  The update worker calls everything but
    ``_fetch``, or the script while the worker has nothing to do.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        shadow: ShadowOptimizer,
        pieces_of: Callable[[Chunk], Sequence[Piece]],
        share: float | None = None,
    ) -> None:
        assert chunks.shelf is not None
        self.chunks, self.shelf = chunks, chunks.shelf
        self.shadow, self.pieces_of = shadow, pieces_of
        self.optim: Optimizer = shadow.optim
        self.kinds = StateKinds(self.optim)
        self.share = None if share is None else DiskShare(share)
        states = TierMemory(chunks.host, "optimizer states on their way from and to the disk")
        weights = TierMemory(chunks.host, "weights on their way from and to the disk")
        self.pipeline = SlotPipeline(self.shelf, Buffers(BUFFERS, states))
        self.weights = Buffers(UPDATES, weights)
        self._choose_sizes()
        chunks.passing += [self.pipeline.buffers, self.weights]
        self._piece_of: dict[Tensor, Piece] = {}
        self.table = SlotTable(self.pipeline)
        self._chunk_of: dict[Piece, Chunk] = {}
        self._decided: set[Piece] = set()
        self._loading: dict[int, tuple[Tensor, Pending | None]] = {}
        self._made = 0
        self._seen: tuple[Piece, dict[str, Tensor]] | None = None

    def _choose_sizes(self) -> None:
        sizes = [sum(map(self.kinds.nbytes, self.pieces_of(c))) for c in self.chunks.chunks]
        self.slot_bytes = slot_size(sum(sizes))
        self.pipeline.buffers.fit(largest_slot(max(sizes, default=0), sum(sizes)))
        on_disk = [c.shard_nbytes for c in self.chunks.chunks if self.chunks.is_on_disk(c)]
        self.weights.fit(max(on_disk, default=0))

    # Questions

    def has(self, chunk: Chunk) -> bool:
        """Return whether anything of ``chunk`` rests on the disk."""
        return self.chunks.is_on_disk(chunk) or any(map(self.has_states, self.pieces_of(chunk)))

    def has_states(self, piece: Piece) -> bool:
        """Whether the states of ``piece`` are in slots."""
        return piece.value in self.table

    def slots_of(self, pieces: Iterable[Piece]) -> list[StateSlot]:
        """Return the slots of ``pieces``, each once, in order."""
        return self.table.slots_of(piece.value for piece in pieces)

    # Where states go

    def place(self, chunk: Chunk, pieces: Sequence[Piece], room: int) -> None:
        """Decide where the states of ``pieces`` rest: when they are updated for the first time, or were
        loaded.

        ``room`` is what the host has for states.  Where nothing of them needs the disk, they are ordinary
        states.
        """
        new = [p for p in pieces if p not in self._decided]
        self._decided.update(new)
        slots: list[StateSlot] = []
        for fields, some in self.kinds.sort(new).items():
            self._made += 1
            name, what = f"states {self._made}.", f"the optimizer states of {chunk.name}"
            whole = not is_elementwise(self.optim)
            slots += slots_for([p.value for p in some], fields, self.slot_bytes, name, what, whole)
        for slot in slots:
            slot.on_disk = self._wants_disk(chunk, slot, room)
            room -= 0 if slot.on_disk else slot.nbytes
        if any(slot.on_disk for slot in slots):
            self._take(slots)
            owners: dict[Tensor, Piece] = {p.value: p for p in new}
            self._piece_of.update(owners)
            self.table.add(slots)
            self._chunk_of.update(dict.fromkeys(new, chunk))

    def _wants_disk(self, chunk: Chunk, slot: StateSlot, room: int) -> bool:
        if self.share is not None:
            return self.share.wants(slot.nbytes)
        return self.chunks.is_on_disk(chunk) or slot.nbytes > room

    def _take(self, slots: Sequence[StateSlot]) -> None:
        for slot in slots:
            if not slot.on_disk:
                self.chunks.host.reserve(slot.nbytes, slot.what)
                continue
            try:
                self.shelf.room(slot.name, slot.nbytes, slot.what)
            except OutOfCapacity as error:
                total = sum(s.nbytes for s in slots)
                raise nowhere([self.chunks.host, self.shelf.tier], slot.what, total) from error
        self.pipeline.fit(slots)

    def forget(self) -> None:
        """Empty all slots, whose states are replaced by others; read back those that are not."""
        for value in self.table.slots:
            state = self.optim.state.get(value, {})
            for name, value in state.items():
                state[name] = fetched(value) if isinstance(value, Tensor) else value
        for slot in self.table.slots_of(self.table.slots):
            if not slot.on_disk:
                self.chunks.host.release(slot.nbytes)
        self.table.forget()
        for known in (self._piece_of, self._chunk_of, self._decided):
            known.clear()
        self._seen = None
        if self.share is not None:
            self.share = DiskShare(self.share.fraction)

    # Weights

    def prepare(self, chunk: Chunk) -> bool:
        """Begin to read what an update of ``chunk`` needs, as far as buffers are free; return whether it has
        begun.
        """
        slots = [slot for slot in self.slots_of(self.pieces_of(chunk)) if slot.on_disk]
        if slots:
            self.pipeline.expect(slots)
        if self.chunks.is_on_disk(chunk) and chunk.index not in self._loading:
            self._load_weights(chunk, must=False)
        return bool(slots) or chunk.index in self._loading

    def _load_weights(self, chunk: Chunk, must: bool = True) -> None:
        buffer = self.weights.get(wait=must, must=must)
        if buffer is not None:
            pending = self.shelf.read(weights_of(chunk), buffer[: chunk.shard_nbytes])
            self._loading[chunk.index] = buffer, pending

    def read_weights(self, chunk: Chunk) -> Tensor | None:
        """Read the weights of ``chunk`` into a buffer for ``write_weights``; None if not on the disk."""
        self._seen = None
        if not self.chunks.is_on_disk(chunk):
            return None
        if chunk.index not in self._loading:
            self._load_weights(chunk)
        buffer, pending = self._loading.pop(chunk.index)
        if pending is not None:
            pending.wait()
        self._show(chunk, buffer[: chunk.shard_nbytes].view(chunk.dtype))
        return buffer

    def write_weights(self, chunk: Chunk, buffer: Tensor | None) -> None:
        """Write back the weights that ``read_weights`` has read."""
        if buffer is None:
            return
        data = buffer[: chunk.shard_nbytes]
        writing = self.shelf.write(weights_of(chunk), data, f"the weights of {chunk.name}")
        self._show(chunk, chunk.shard)
        self.weights.give(buffer, writing.finish)

    def _show(self, chunk: Chunk, shard: Tensor) -> None:
        for piece in self.pieces_of(chunk):
            self.shadow.show(piece, piece.in_shard(shard))

    # States

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece], work: Work | None = None) -> None:
        """Let ``work`` update ``pieces`` part by part, whose weights are in memory; without it, only fill
        their slots.
        """
        wanted = set(pieces)

        def on(slot: StateSlot, buffer: Tensor) -> None:
            parts = self._parts(slot, buffer, has_weights=work is not None)
            if work is not None:
                work([part for part in parts if part.piece in wanted])

        self._seen = None
        self.pipeline.run(self.slots_of(pieces), on)

    def _parts(self, slot: StateSlot, buffer: Tensor, has_weights: bool) -> list[StatePart]:
        """Return the parts of ``slot``, with initial states if it is new."""
        is_new = not slot.is_filled
        if is_new:
            for extent, states in slot.states(buffer):
                known = self.optim.state.get(extent.parameter, {})
                large = {n: extent.of(row(v)) for n, v in known.items() if n in states}
                begin(states, large, extent.of(row(extent.parameter.detach())))
        if has_weights and slot.has(MASTER) and self.kinds.splits(slot.extents[0].parameter):
            self._take_digits(slot, buffer)
            is_new = True
        found = slot.states(buffer)
        return [StatePart(self._piece_of[e.parameter], e, states, is_new) for e, states in found]

    def _take_digits(self, slot: StateSlot, buffer: Tensor) -> None:
        """Replace loaded masters by the digits that the weights lack, see [Note: masters that wait]."""
        tails = [
            tail_of(states[MASTER], extent.of(row(extent.parameter.detach())))
            for extent, states in slot.states(buffer)
        ]
        slot.set_fields(self.kinds.with_tail(slot.fields))
        if slot.on_disk:
            self.shelf.room(slot.name, slot.nbytes, slot.what)
        for (extent, states), tail in zip(slot.states(buffer), tails, strict=True):
            states["tail"].copy_(tail)
            self.shadow.mark_current(self.shadow.param(self._piece_of[extent.parameter]))

    def show_states(self, piece: Piece, small: dict[str, Any]) -> None:
        """Let ``optim.state`` show the states of ``piece`` that are in slots as lazy tensors, and ``small``
        as it is.
        """
        fields = self.table.slots[piece.value][0].fields
        names = {MASTER: torch.float32} if ("tail", torch.int16) in fields else {}
        names = {name: dtype for name, dtype in fields if name != "tail"} | names
        self.optim.state[piece.value] = {
            **small,
            **{
                n: lazy_tensor(piece.value.shape, d, partial(self._fetch, piece, n)) for n, d in names.items()
            },
        }

    def store_states(self, pieces: Sequence[Piece]) -> None:
        """Move loaded states of ``pieces`` into their slots."""
        some = [p for p in pieces if self.has_states(p)]
        self.run(some)
        for piece in some:
            self.show_states(piece, small_of(self.optim.state[piece.value]))

    # Checkpoints

    def _fetch(self, piece: Piece, name: str) -> Tensor:
        """Read a state of ``piece``; the others, which are asked for soon, are read with it."""
        if self._seen is None or self._seen[0] is not piece or name not in self._seen[1]:
            self._seen = piece, self._read(piece)
        return self._seen[1].pop(name).view(piece.value.shape)

    def _read(self, piece: Piece) -> dict[str, Tensor]:
        has_tails = any(slot.has("tail") for slot in self.table.slots[piece.value])
        weight = self._weight(piece) if has_tails else None

        def parts_of(slot: StateSlot) -> Iterator[Part]:
            return slot.states(self.pipeline.look_at(slot))

        def master(_: StateSlot, extent: Extent, states: dict[str, Tensor]) -> None:
            if weight is not None and "tail" in states:
                states[MASTER] = join(extent.of(weight), states.pop("tail"))

        return self.table.read(piece.value, parts_of, master)

    def _weight(self, piece: Piece) -> Tensor:
        chunk = self._chunk_of[piece]
        if self.chunks.is_on_disk(chunk):
            return row(piece.in_shard(self.chunks.read_shard(chunk)))
        return row(piece.weight.detach())


def small_of(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the states of a piece that always stay in memory: single numbers."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not is_large(value) and not is_lazy(value)
    }


def share_on_disk(optim: Optimizer, module: ZeroDDP) -> float | None:
    """Return ``nvme_offload_fraction`` of the user's optimizer, and let the disk tier do its work."""
    fraction, directory = optim.give_up_offload() if isinstance(optim, NVMeOptimizer) else (0.0, None)
    chunks = module.chunk_manager
    if not fraction:
        return None
    if chunks.shelf is not None:
        raise ValueError(
            f"{type(optim).__name__} has nvme_offload_fraction={fraction}, and the model has"
            f" disk_dir={chunks.shelf.store.directory!r}; give one of them: the disk tier takes the optimizer"
            " states too"
        )
    chunks.add_disk(directory)
    memory = module.gradients.memory
    memory.spilled.reserve(memory.host.largest)
    return fraction


def make_disk_states(
    module: ZeroDDP, shadow: ShadowOptimizer, chunk_pieces: ChunkPieces, share: float | None
) -> DiskStates | None:
    """Make what the optimizer needs for the disk tier of ``module``; None if it has none."""
    optim = shadow.optim
    if module.chunk_manager.shelf is None:
        return None
    if needs_masters(optim, module.dtype):
        raise ValueError(
            f"the disk tier has no place for the float32 weights that {type(optim).__name__} needs to train"
            f" in {module.dtype}; use one of our optimizers (HybridAdam, FusedSGD), or float32"
        )
    return DiskStates(module.chunk_manager, shadow, chunk_pieces.pieces, share)


def install_states(optim: Optimizer, states: Mapping[Piece, Mapping[str, Any]]) -> None:
    """Load ``states`` of some pieces as ``optim.load_state_dict`` would, and leave those of the others as
    they are.
    """
    if not states:
        return
    copy = stateless_copy(optim)
    of = {id(piece.value): state for piece, state in states.items()}
    own = [[p for p in group["params"] if id(p) in of] for group in optim.param_groups]
    options = group_options(optim)
    copy.param_groups = [{**o, "params": params} for o, params in zip(options, own, strict=True)]
    numbers = {id(p): n for n, p in enumerate(p for params in own for p in params)}
    copy.load_state_dict(
        {
            "state": {numbers[key]: dict(state) for key, state in of.items()},
            "param_groups": [
                {**o, "params": [numbers[id(p)] for p in ps]} for o, ps in zip(options, own, strict=True)
            ],
        }
    )
    optim.state.update(copy.state)
