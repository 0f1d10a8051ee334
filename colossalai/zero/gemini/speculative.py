"""HostUpdates on trial: begun in the backward pass, before it is known what clipping or the loss scale will say.

Most steps are not clipped and do not overflow.  So the host, which has nothing else to do in the backward pass, updates chunks whose
gradients have come as if this step were one of these, and keeps what they were before.  When the norm of all gradients is known, the
updates stand; or, in a bad step, they are taken back and done again with the right factor, or not at all.  What is taken back is what
was, to the last bit.

An update that the step finds still waiting is an ordinary one from then on.  Somebody who looks at the weights or at the gradients between the
backward pass and the step takes all trials back first: to him nothing has happened yet.  So does the backward pass itself with a chunk
whose weights it needs again.

[Note: what is not tried]
A chunk without states, or with weights that were loaded: its first update makes states for them.  With a loss scale, a chunk of float32
(weights of batch norm): torch's kernel leaves divided gradients behind, which could not be divided again.

What a chunk was before an update: its weights and optimizer states, to go back to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel.snapshot import TensorSnapshot, aligned
from colossalai.nn.optimizer.base import HALVES, MultiTensorOptimizer
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_gradients import PendingGradients
from colossalai.zero.gemini.host_updates import HostUpdates
from colossalai.zero.gemini.optimizer_states import StateKinds, is_large
from colossalai.zero.gemini.shadow_optimizer import Options
from colossalai.zero.gemini.tiers import OutOfCapacity, Tier


class SnapshotBuffers:
    """Buffers of ``most`` bytes in all, in the memory of ``tier``, as long as ``room()`` has so many; used again and again.

    One thread gets them, any may put them back.
    """

    def __init__(self, tier: Tier, most: int, room: Callable[[], int]) -> None:
        self.tier, self.most, self.room = tier, most, room
        self.made = 0  # bytes
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def get(self, nbytes: int) -> Tensor | None:
        """A buffer of at least ``nbytes``; None if there is none left."""
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda buffer: buffer.nbytes)
                self._free = [buffer for buffer in self._free if buffer is not best]
                return best
        if nbytes > self.room():
            return None
        with self._lock:
            if self.made + nbytes > self.most:
                return None
            self.made += nbytes
        try:
            self.tier.take(nbytes, "what updates in the backward pass may have to go back to")
        except OutOfCapacity:  # an update took the room meanwhile
            with self._lock:
                self.made -= nbytes
            return None
        return torch.empty(nbytes, dtype=torch.uint8)  # only the CPU touches it: not page-locked

    def put(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Somebody needs the memory: give back what is not in use."""
        with self._lock:
            free, self._free = self._free, []
            self.made -= sum(buffer.nbytes for buffer in free)
        for buffer in free:
            self.tier.give(buffer.nbytes)


class Snapshot:
    """Memory in ``buffer`` for what ``tensors`` and the entries of ``states`` are before an update, which writes the copies (``kept``)."""

    def __init__(
        self, buffer: Tensor, tensors: Sequence[Tensor], states: Iterable[MutableMapping[str, Any]]
    ) -> None:
        self._entries = [(state, dict(state)) for state in states]
        held = [v for _, entries in self._entries for v in entries.values() if torch.is_tensor(v)]
        self.kept = TensorSnapshot(buffer, (*tensors, *held))
        self.kept.copy([tensor for tensor in held if not is_large(tensor)])  # counters of steps go up first

    def restore(self) -> None:
        """Write everything back."""
        self.kept.restore()
        for state, entries in self._entries:
            state.clear()
            state.update(entries)


UNDO_RATIO = 0.25
STEP_BYTES = 4  # the number of steps, which every state has


class UpdateState(Enum):
    PENDING = "the optimizer's step has not decided yet"
    ACCEPTED = "the step confirmed the update"
    ORDINARY = "the step came before the update began, which is an ordinary one now"
    CANCELLED = "the update must not begin"


@dataclass
class SpeculativeUpdate:
    """The update of ``chunk`` with ``factor``, which may turn out to be another."""

    chunk: Chunk
    options: Options
    factor: float
    seen: PendingGradients
    """Its gradients, which are not handed over yet."""
    parts: int
    """How many summands they had."""
    buffer: Tensor
    snapshot: Snapshot | None = None
    taken: PendingGradients | None = None
    """Its gradients, handed over by the step."""
    is_begun: bool = False
    is_done: bool = False
    state: UpdateState = UpdateState.PENDING


class SpeculativeUpdates:
    """Those of one step; ``share`` of the weights and states on the host may be kept at the same time."""

    def __init__(self, updates: HostUpdates, share: float) -> None:
        self.updates, self.share = updates, share
        self.gradients, self.manager = updates.model.gradients, updates.manager
        self.chunks = self.gradients.chunks
        self._kinds = StateKinds(updates.optim)
        self._keeps = getattr(updates.optim, "keeps", False)
        self._buffers: SnapshotBuffers | None = None
        self._pending: dict[int, SpeculativeUpdate] = {}
        self._lock = threading.Lock()
        self.chunks.host.reclaim = _weakly(self.make_room)

    @property
    def has_pending(self) -> bool:
        """Whether something has been tried that no step has judged."""
        return bool(self._pending)

    def begin(self, chunk: Chunk, options: Options, factor: float) -> None:
        """Update ``chunk`` with the gradients that it has now, if it can be taken back."""
        seen = self.gradients.of[chunk.index].peek()
        if chunk.index in self._pending or seen is None or not self._is_eligible(chunk, seen, factor):
            return
        buffer = self.buffers.get(self._bytes(chunk))
        if buffer is None:
            return
        parts = self.gradients.of[chunk.index].parts
        trial = SpeculativeUpdate(chunk, options, factor, seen, parts, buffer)
        self._pending[chunk.index] = trial
        priority = self.manager.trace.first_use(chunk.index)
        self.manager.worker.submit(
            chunk.index, priority, chunk.name, partial(self._run, trial), seen.has_arrived
        )

    def _is_eligible(self, chunk: Chunk, seen: PendingGradients, factor: float) -> bool:
        """[Note: what is not tried]"""
        if factor != 1.0 and chunk.dtype == torch.float32:
            return False
        state, shadow = self.updates.optim.state, self.updates.shadow
        pieces = self.updates.stepped(chunk, seen.used)
        for piece in pieces:
            if not state.get(piece.value):
                return False
            if piece.value.dtype in HALVES and not shadow.is_followed(piece):
                return False
        return bool(pieces)  # other ranks may have all of it

    # Memory

    @property
    def buffers(self) -> SnapshotBuffers:
        if self._buffers is None:
            most = int(self.share * sum(map(self._bytes, self._hosted())))
            self._buffers = SnapshotBuffers(self.chunks.host, most, self._room)
        return self._buffers

    def _hosted(self) -> list[Chunk]:
        every = (self.chunks.chunks[i] for i in self.gradients.of)
        return [chunk for chunk in every if chunk.home is self.chunks.host]

    def _bytes(self, chunk: Chunk) -> int:
        """Of its weights and states, each where a copy may begin."""
        total = 0
        for piece in self.updates.chunk_pieces.pieces(chunk):
            dtypes = [piece.value.dtype, *(dtype for _, dtype in self._kinds.of(piece))]
            total += sum(aligned(piece.value.numel() * dtype.itemsize) for dtype in dtypes)
            total += aligned(STEP_BYTES)
        return total

    def _room(self) -> int:
        """Bytes of the host that nobody else will need: not for states that have not been made yet."""
        state_bytes = self.updates.state_bytes
        return state_bytes.room() - sum(map(state_bytes.coming, self._hosted()))

    def make_room(self) -> None:
        """The host has no room for something that must be there."""
        if not self.manager.worker.is_current_thread:  # which cannot wait for itself
            self.roll_back()
        self.buffers.release()

    # The update

    @torch.no_grad()
    def _run(self, trial: SpeculativeUpdate) -> None:
        """The job."""
        with self._lock:
            if trial.state is UpdateState.CANCELLED:
                return
            trial.is_begun = trial.state is UpdateState.PENDING
        updates, chunk = self.updates, trial.chunk
        if not trial.is_begun:
            assert trial.taken is not None
            updates.run(chunk, trial.taken, trial.options, trial.factor)
            return
        shard, used = trial.seen.shard, trial.seen.used
        assert shard is not None
        trial.seen.wait()
        self.gradients.of[chunk.index].settle()
        self.manager.timeline.note("try", chunk)
        pieces = updates.stepped(chunk, used)
        values, states = [p.value for p in pieces], [updates.optim.state[p.value] for p in pieces]
        trial.snapshot = Snapshot(trial.buffer, values, states)
        kept = trial.snapshot.kept if self._keeps else None
        if kept is None:
            trial.snapshot.kept.copy()
        updates.apply(chunk, shard, used, trial.options, trial.factor, kept)
        with self._lock:
            trial.is_done = True
            if trial.state is UpdateState.ACCEPTED:
                self._close(trial)

    def _close(self, trial: SpeculativeUpdate) -> None:
        """Nobody will go back."""
        assert trial.taken is not None
        assert trial.taken.shard is not None
        self.gradients.memory.put(trial.taken.shard)
        self.buffers.put(trial.buffer)
        trial.snapshot = None

    # The verdict

    def decide(self, options: Options, factor: float) -> set[int]:
        """The step is to be made with these: returns the chunks whose update is done or under way; others have none."""
        decided: set[int] = set()
        for index, trial in self._pending.items():
            with self._lock:
                if not trial.is_begun:
                    trial.state, trial.options, trial.factor = UpdateState.ORDINARY, options, factor
                    self.buffers.put(trial.buffer)
                elif (
                    trial.factor == factor
                    and same_options(trial.options, options)
                    and self._is_complete(trial)
                ):
                    trial.state = UpdateState.ACCEPTED
                else:
                    continue
                trial.taken = self.gradients.of[trial.chunk.index].release()
                if trial.is_done:
                    self._close(trial)
            decided.add(index)
        self._pending = {i: trial for i, trial in self._pending.items() if i not in decided}
        self.roll_back()
        return decided

    def _is_complete(self, trial: SpeculativeUpdate) -> bool:
        """Whether no more gradients came for the chunk after its trial had been asked for."""
        return self.gradients.of[trial.chunk.index].parts == trial.parts

    def roll_back(self) -> None:
        """Let everything be as if no update had begun."""
        trials, self._pending = list(self._pending.values()), {}
        self._roll_back(trials)

    def roll_back_chunk(self, chunk: Chunk) -> None:
        """The backward pass needs the weights of ``chunk`` again."""
        if chunk.index in self._pending:
            self._roll_back([self._pending.pop(chunk.index)])

    def _roll_back(self, trials: list[SpeculativeUpdate]) -> None:
        for trial in trials:
            with self._lock:
                if not trial.is_begun:
                    trial.state = UpdateState.CANCELLED
        for trial in trials:
            self.manager.worker.wait(trial.chunk.index)
            if trial.snapshot is not None:
                self._restore(trial)
            self.buffers.put(trial.buffer)

    def _restore(self, trial: SpeculativeUpdate) -> None:
        assert trial.snapshot is not None
        self.manager.timeline.note("undo", trial.chunk)
        with self.updates.shadow.steady(self.updates.chunk_pieces.pieces(trial.chunk)):
            trial.snapshot.restore()
        trial.snapshot = None


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """``method``, as long as somebody else holds its object: hooks of parameters, which no garbage collector sees into, hold tiers."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call


def can_roll_back(optim: Any) -> bool:
    """Whether updates take a factor for the gradients, and leave them as they are [Note: what is not tried]."""
    return isinstance(optim, MultiTensorOptimizer) and optim.divides


def same_options(some: Options, others: Options) -> bool:
    """Whether two options of all groups have the same values."""
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) or torch.is_tensor(b):
        return torch.is_tensor(a) and torch.is_tensor(b) and torch.equal(a, b)
    try:
        return bool(a == b)
    except (ValueError, TypeError):  # an array of somebody
        return False
