"""Optimizer states, and weights, of chunks that rest on the disk: how an update gets at them.

    read states (and weights) -> update on the host -> write back

A few buffers go round between the disk and the thread that updates: while one chunk is updated, the next is read and the one before
is written.  In a buffer lie the weights of the chunk, if they rest on the disk too, and then its states.  While a chunk is away, its states
have a shape and a dtype but no values (they are on the meta device), and its weights show NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.kernel.split import join
from colossalai.nn.optimizer.base import HALVES, MultiTensorOptimizer, wide
from colossalai.nn.optimizer.nvme_optimizer import NVMeOptimizer
from colossalai.utils.disk import Pending, aligned_empty
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.ddp import ZeroDDP
from colossalai.zero.gemini.shelf import (
    BUFFERS,
    STATES,
    UNIT,
    Buffers,
    Shelf,
    after_weights,
    states_of,
    weights_of,
)
from colossalai.zero.gemini.stepping import is_large
from colossalai.zero.gemini.tiers import OutOfCapacity, nowhere
from colossalai.zero.pieces import Piece
from colossalai.zero.sharded import needs_masters
from colossalai.zero.states import away


@dataclass(frozen=True)
class Field:
    """A state of a piece, and where it lies in the buffer."""

    piece: Piece
    key: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Resting:
    """What rests on the disk of an optimizer over chunks.

    ``pieces_of`` gives the pieces of a chunk that are not empty; ``twins`` are what the update steps in their place.  All but ``fetch``
    belongs to the thread that updates, or to the script while that has nothing to do.
    """

    def __init__(
        self,
        shelf: Shelf,
        buffers: Buffers,
        optim: Optimizer,
        pieces_of: Callable[[Chunk], Sequence[Piece]],
        twins: dict[Piece, nn.Parameter],
        share: float | None = None,
    ) -> None:
        self.share = share
        self._placed = [0, 0]  # bytes of states on the disk, and in all
        self.shelf, self.buffers, self.optim = shelf, buffers, optim
        self.pieces_of, self.twins = pieces_of, twins
        self.fields: dict[int, list[Field]] = {}  # of chunks whose states rest on the disk
        self._loading: dict[int, tuple[Tensor, list[Pending | None]]] = {}
        self._decided: set[int] = set()
        self._seen: tuple[int, Tensor] | None = None

    # Questions

    def has_weights(self, chunk: Chunk) -> bool:
        return chunk.home is self.shelf.tier

    def has_states(self, chunk: Chunk) -> bool:
        return chunk.index in self.fields

    def has(self, chunk: Chunk) -> bool:
        return self.has_weights(chunk) or self.has_states(chunk)

    def _begin(self, chunk: Chunk) -> int:
        """Where states begin in the buffer of ``chunk``."""
        return after_weights(chunk) if self.has_weights(chunk) else 0

    def _nbytes(self, chunk: Chunk) -> int:
        fields = self.fields.get(chunk.index)
        return _end(fields) if fields else self._begin(chunk)

    # Before an update

    def takes(self, chunk: Chunk, nbytes: int, room: int) -> bool:
        """Whether ``chunk`` needs the disk for an update after which it has ``nbytes`` more of states; decided at its first.

        ``room`` is what the host has for states.
        """
        if self.has_states(chunk) or chunk.index in self._decided:
            return self.has(chunk)
        self._decided.add(chunk.index)
        if self._wants_disk(chunk, nbytes, room):
            self.start(chunk, nbytes + UNIT * STATES * len(self.pieces_of(chunk)))
        return self.has(chunk)

    def _wants_disk(self, chunk: Chunk, nbytes: int, room: int) -> bool:
        if self.has_weights(chunk):
            return True
        if self.share is None:
            return nbytes > room
        on_disk, total = self._placed[0], self._placed[1] + nbytes
        wants = bool(on_disk + nbytes / 2 <= self.share * total)
        self._placed = [on_disk + nbytes * wants, total]
        return wants

    def start(self, chunk: Chunk, nbytes: int) -> None:
        """The states of ``chunk``, of ``nbytes``, will rest on the disk from the coming update on."""
        what = f"the optimizer states of {chunk.name}"
        try:
            self.shelf.room(states_of(chunk), nbytes, what)
        except OutOfCapacity as error:
            raise nowhere([self.buffers.host, self.shelf.tier], what, nbytes) from error
        self.fields[chunk.index] = []
        self.buffers.fit(self._begin(chunk) + nbytes)

    def prepare(self, chunk: Chunk) -> bool:
        """Begin to read what an update of ``chunk`` needs, if a buffer is free; whether that is under way."""
        if chunk.index in self._loading:
            return True
        if not self.has(chunk):
            return False
        buffer = self.buffers.get(self._nbytes(chunk), force=False)
        if buffer is not None:
            self._loading[chunk.index] = buffer, self._load(chunk, buffer)
        return buffer is not None

    def _load(self, chunk: Chunk, buffer: Tensor) -> list[Pending | None]:
        pending: list[Pending | None] = []
        if self.has_weights(chunk):
            pending.append(self.shelf.read(weights_of(chunk), buffer[: chunk.shard_nbytes]))
        if self.fields.get(chunk.index):
            begin = self._begin(chunk)
            pending.append(self.shelf.read(states_of(chunk), buffer[begin : self._nbytes(chunk)]))
        return pending

    def bring(self, chunk: Chunk) -> Tensor:
        """Let the pieces of ``chunk`` have their weights and states, in a buffer that ``put`` takes back."""
        self._seen = None
        if chunk.index in self._loading:
            buffer, loading = self._loading.pop(chunk.index)
        else:
            found = self.buffers.get(self._nbytes(chunk))
            assert found is not None
            buffer, loading = found, self._load(chunk, found)
        for pending in loading:
            if pending is not None:
                pending.wait()
        if self.has_weights(chunk):
            self._show_weights(chunk, buffer[: chunk.shard_nbytes].view(chunk.dtype))
        for field in self.fields.get(chunk.index, []):
            self.optim.state[field.piece.value][field.key] = field.view(buffer)
        return buffer

    def fill(self, chunk: Chunk, buffer: Tensor, pieces: Sequence[Piece]) -> None:
        """Let states of our optimizers that do not exist yet begin in the buffer, so that they take no other memory."""
        if not isinstance(self.optim, MultiTensorOptimizer):
            return
        offset = max(self._nbytes(chunk), self._begin(chunk))
        for piece in pieces:
            if self.optim.state.get(piece.value):
                continue
            state = self.optim.state[piece.value]
            for key, dtype in kinds(self.optim, piece):
                made = Field(piece, key, dtype, piece.value.shape, _aligned(offset))
                if made.offset + made.nbytes > buffer.nbytes:
                    return  # the optimizer makes it, and it is laid into a larger buffer afterwards
                view = made.view(buffer)
                view.copy_(piece.value.detach()) if key == "master" else view.zero_()
                state[key] = view
                offset = made.offset + made.nbytes

    # After an update

    @torch.no_grad()
    def put(self, chunk: Chunk, buffer: Tensor) -> None:
        """Write back what ``bring`` brought, and what the update added to it."""
        writes = []
        if self.has_states(chunk):
            buffer = self._lay_out(chunk, buffer)
            begin, end = self._begin(chunk), self._nbytes(chunk)
            if end > begin:
                what = f"the optimizer states of {chunk.name}"
                self.shelf.room(states_of(chunk), end - begin, what)
                writes.append(self.shelf.write(states_of(chunk), buffer[begin:end], what))
        if self.has_weights(chunk):
            data = buffer[: chunk.shard_nbytes]
            writes.append(self.shelf.write(weights_of(chunk), data, f"the weights of {chunk.name}"))
        self._hide(chunk)

        def wait() -> None:
            for writing in writes:
                writing.finish()

        self.buffers.give(buffer, wait)

    def _lay_out(self, chunk: Chunk, buffer: Tensor) -> Tensor:
        """Let all states of ``chunk`` lie in the buffer, one after the other; in another buffer if this is too small."""
        offset, fields = self._begin(chunk), []
        for piece in self.pieces_of(chunk):
            for key, value in self.optim.state.get(piece.value, {}).items():
                if is_large(value):
                    fields.append(Field(piece, key, value.dtype, value.shape, _aligned(offset)))
                    offset = fields[-1].offset + fields[-1].nbytes
        states = [self.optim.state[f.piece.value][f.key] for f in fields]
        self.fields[chunk.index] = fields
        start = buffer.data_ptr()
        if all(
            t.data_ptr() == start + f.offset and t.is_contiguous()
            for f, t in zip(fields, states, strict=True)
        ):
            return buffer
        states = [t.clone() for t in states]
        if offset > buffer.nbytes:
            weights = buffer[: self._begin(chunk)].clone()
            self.buffers.fit(offset)
            self.buffers.give(buffer)
            larger = self.buffers.get(offset)
            assert larger is not None
            buffer = larger
            buffer[: weights.numel()].copy_(weights)
        for field, value in zip(fields, states, strict=True):
            field.view(buffer).copy_(value)
        return buffer

    def _hide(self, chunk: Chunk) -> None:
        """Let the pieces have no values, but say where they are."""
        if self.has_weights(chunk):
            self._show_weights(chunk, chunk.shard)
        for field in self.fields.get(chunk.index, []):
            fetch = partial(self._fetch, chunk, field)
            self.optim.state[field.piece.value][field.key] = away(field.shape, field.dtype, fetch)

    def _show_weights(self, chunk: Chunk, shard: Tensor) -> None:
        for piece in self.pieces_of(chunk):
            piece.weight = piece.in_shard(shard)
            piece.value.data = piece.weight
            if piece in self.twins:
                self.twins[piece].data = piece.weight

    # Checkpoints

    def _look_at(self, chunk: Chunk) -> Tensor:
        """What rests of ``chunk``, to be read only; states that follow each other are read at once."""
        if self._seen is None or self._seen[0] != chunk.index:
            buffer = aligned_empty(max(self._nbytes(chunk), 1))
            for pending in self._load(chunk, buffer):
                if pending is not None:
                    pending.wait()
            self._seen = chunk.index, buffer
        return self._seen[1]

    def _fetch(self, chunk: Chunk, field: Field) -> Tensor:
        return field.view(self._look_at(chunk)).clone()

    def look_away(self) -> None:
        self._seen = None

    def portable(self, chunk: Chunk, piece: Piece) -> dict[str, Any]:
        """The state of ``piece`` for a checkpoint: what rests on the disk is read when it is asked for."""
        state = dict(self.optim.state.get(piece.value, {}))
        if "tail" in state:
            state.pop("tail")
            state["master"] = away(piece.value.shape, torch.float32, partial(self._master, chunk, piece))
        return state

    def _master(self, chunk: Chunk, piece: Piece) -> Tensor:
        buffer = self._look_at(chunk)
        weight = piece.weight
        if self.has_weights(chunk):
            weight = piece.in_shard(buffer[: chunk.shard_nbytes].view(chunk.dtype))
        tail = next(f for f in self.fields[chunk.index] if f.piece is piece and f.key == "tail")
        return join(weight.detach(), tail.view(buffer))

    def forget_states(self, chunk: Chunk) -> None:
        """The states of ``chunk`` are replaced by others."""
        self._seen = None
        self._decided.discard(chunk.index)
        if self.fields.pop(chunk.index, None):
            self.shelf.free(states_of(chunk))


def _aligned(offset: int) -> int:
    return -(-offset // UNIT) * UNIT


def _end(fields: Sequence[Field]) -> int:
    return fields[-1].offset + fields[-1].nbytes


def kinds(optim: MultiTensorOptimizer, piece: Piece) -> list[tuple[str, torch.dtype]]:
    """The states that one of our optimizers keeps of ``piece``, with their dtypes."""
    group = next(g for g in optim.param_groups if any(p is piece.value for p in g["params"]))
    found = [(name, wide(piece.value)) for name in optim.state_names(group)]
    if piece.value.dtype in HALVES:
        extra = optim.extra(piece.value)
        found.append((extra, torch.int16 if extra == "tail" else torch.float32))
    return found


def state_bytes(optim: Optimizer, piece: Piece) -> int:
    """Bytes of the states of ``piece``; of an optimizer that is not ours, what Adam has."""
    if not isinstance(optim, MultiTensorOptimizer):
        return piece.value.numel() * 2 * piece.value.dtype.itemsize
    return piece.value.numel() * sum(dtype.itemsize for _, dtype in kinds(optim, piece))


def share_on_disk(optim: Optimizer, module: ZeroDDP) -> float | None:
    """``nvme_offload_fraction`` of the user's optimizer: from here on the disk tier does what it asked for."""
    fraction, directory = optim.give_up_offload() if isinstance(optim, NVMeOptimizer) else (0.0, None)
    chunks = module.chunk_manager
    if not fraction:
        return None
    if chunks.shelf is not None:
        raise ValueError(
            f"{type(optim).__name__} has nvme_offload_fraction={fraction}, and the model has disk_dir={chunks.shelf.store.directory!r};"
            " give one of them: the disk tier takes the optimizer states too"
        )
    chunks.add_disk(directory)
    module.gradients.spilled.reserve(module.gradients.host.largest)
    return fraction


def make_resting(
    optim: Optimizer,
    module: ZeroDDP,
    pieces_of: Callable[[Chunk], Sequence[Piece]],
    twins: dict[Piece, nn.Parameter],
    share: float | None,
) -> Resting | None:
    """What the optimizer needs for the disk tier of ``module``; None if it has none."""
    chunks = module.chunk_manager
    if chunks.shelf is None:
        return None
    if needs_masters(optim, module.dtype):
        raise ValueError(
            f"the disk tier has no place for the float32 weights that {type(optim).__name__} needs to train in {module.dtype}; use one of"
            " our optimizers (HybridAdam, FusedSGD), or float32"
        )
    most = max(
        (
            after_weights(c) * chunks.is_on_disk(c)
            + sum(state_bytes(optim, p) + UNIT * STATES for p in pieces_of(c))
            for c in chunks.chunks
        ),
        default=0,
    )
    buffers = Buffers(chunks.host, BUFFERS, "optimizer states on their way from and to the disk")
    buffers.fit(most)
    chunks.passing.append(buffers)
    return Resting(chunks.shelf, buffers, optim, pieces_of, twins, share)
