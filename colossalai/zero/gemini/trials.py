"""Updates on trial: begun in the backward pass, before it is known what clipping or the loss scale will say.

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
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel.kept import aligned
from colossalai.nn.optimizer.base import HALVES, MultiTensorOptimizer
from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.grad_buffers import Taken
from colossalai.zero.gemini.second import Options
from colossalai.zero.gemini.state_kinds import Kinds
from colossalai.zero.gemini.undo import Undo, UndoBuffers
from colossalai.zero.gemini.updates import Updates

UNDO_RATIO = 0.25
STEP_BYTES = 4  # the number of steps, which every state has


class Verdict(Enum):
    OPEN = "nobody knows"
    STANDS = "it was right"
    PLAIN = "the step came before it began"
    OFF = "it shall not begin"


@dataclass
class Trial:
    """The update of ``chunk`` with ``factor``, which may turn out to be another."""

    chunk: Chunk
    options: Options
    factor: float
    seen: Taken
    """Its gradients, which are not handed over yet."""
    parts: int
    """How many summands they had."""
    buffer: Tensor
    undo: Undo | None = None
    taken: Taken | None = None
    """Its gradients, handed over by the step."""
    is_begun: bool = False
    is_done: bool = False
    verdict: Verdict = Verdict.OPEN


class Trials:
    """Those of one step; ``share`` of the weights and states on the host may be kept at the same time."""

    def __init__(self, updates: Updates, share: float) -> None:
        self.updates, self.share = updates, share
        self.gradients, self.manager = updates.model.gradients, updates.manager
        self.chunks = self.gradients.chunks
        self._kinds = Kinds(updates.optim)
        self._keeps = getattr(updates.optim, "keeps", False)
        self._buffers: UndoBuffers | None = None
        self._open: dict[int, Trial] = {}
        self._lock = threading.Lock()
        self.chunks.host.reclaim = _weakly(self.make_room)

    @property
    def has_open(self) -> bool:
        """Whether something has been tried that no step has judged."""
        return bool(self._open)

    def begin(self, chunk: Chunk, options: Options, factor: float) -> None:
        """Update ``chunk`` with the gradients that it has now, if it can be taken back."""
        seen = self.gradients.look(chunk)
        if chunk.index in self._open or seen is None or not self._can_be_tried(chunk, seen, factor):
            return
        buffer = self.buffers.get(self._bytes(chunk))
        if buffer is None:
            return
        parts = self.gradients.of[chunk.index].parts
        trial = Trial(chunk, options, factor, seen, parts, buffer)
        self._open[chunk.index] = trial
        priority = self.manager.trace.first_use(chunk.index)
        self.manager.worker.submit(chunk.index, priority, chunk.name, partial(self._run, trial), seen.is_here)

    def _can_be_tried(self, chunk: Chunk, seen: Taken, factor: float) -> bool:
        """[Note: what is not tried]"""
        if factor != 1.0 and chunk.dtype == torch.float32:
            return False
        state, second = self.updates.optim.state, self.updates.second
        pieces = self.updates.stepped(chunk, seen.used)
        for piece in pieces:
            if not state.get(piece.value):
                return False
            if piece.value.dtype in HALVES and not second.is_followed(piece):
                return False
        return bool(pieces)  # other ranks may have all of it

    # Memory

    @property
    def buffers(self) -> UndoBuffers:
        if self._buffers is None:
            most = int(self.share * sum(map(self._bytes, self._hosted())))
            self._buffers = UndoBuffers(self.chunks.host, most, self._room)
        return self._buffers

    def _hosted(self) -> list[Chunk]:
        every = (self.chunks.chunks[i] for i in self.gradients.of)
        return [chunk for chunk in every if chunk.home is self.chunks.host]

    def _bytes(self, chunk: Chunk) -> int:
        """Of its weights and states, each where a copy may begin."""
        total = 0
        for piece in self.updates.members.pieces(chunk):
            dtypes = [piece.value.dtype, *(dtype for _, dtype in self._kinds.of(piece))]
            total += sum(aligned(piece.value.numel() * dtype.itemsize) for dtype in dtypes)
            total += aligned(STEP_BYTES)
        return total

    def _room(self) -> int:
        """Bytes of the host that nobody else will need: not for states that have not been made yet."""
        accounts = self.updates.accounts
        return accounts.room() - sum(map(accounts.coming, self._hosted()))

    def make_room(self) -> None:
        """The host has no room for something that must be there."""
        if not self.manager.worker.is_current_thread:  # which cannot wait for itself
            self.take_back()
        self.buffers.release()

    # The update

    @torch.no_grad()
    def _run(self, trial: Trial) -> None:
        """The job."""
        with self._lock:
            if trial.verdict is Verdict.OFF:
                return
            trial.is_begun = trial.verdict is Verdict.OPEN
        updates, chunk = self.updates, trial.chunk
        if not trial.is_begun:
            assert trial.taken is not None
            updates.run(chunk, trial.taken, trial.options, trial.factor)
            return
        shard, used = trial.seen.shard, trial.seen.used
        assert shard is not None
        for move in trial.seen.arriving:
            move.finish()
        self.gradients.settle(chunk)
        self.manager.timeline.note("try", chunk)
        pieces = updates.stepped(chunk, used)
        values, states = [p.value for p in pieces], [updates.optim.state[p.value] for p in pieces]
        trial.undo = Undo(trial.buffer, values, states)
        kept = trial.undo.kept if self._keeps else None
        if kept is None:
            trial.undo.kept.copy()
        updates.apply(chunk, shard, used, trial.options, trial.factor, kept)
        with self._lock:
            trial.is_done = True
            if trial.verdict is Verdict.STANDS:
                self._close(trial)

    def _close(self, trial: Trial) -> None:
        """Nobody will go back."""
        assert trial.taken is not None
        assert trial.taken.shard is not None
        self.gradients.put(trial.taken.shard)
        self.buffers.put(trial.buffer)
        trial.undo = None

    # The verdict

    def judge(self, options: Options, factor: float) -> set[int]:
        """The step is to be made with these: returns the chunks whose update is done or under way; others have none."""
        decided: set[int] = set()
        for index, trial in self._open.items():
            with self._lock:
                if not trial.is_begun:
                    trial.verdict, trial.options, trial.factor = Verdict.PLAIN, options, factor
                    self.buffers.put(trial.buffer)
                elif trial.factor == factor and same(trial.options, options) and self._was_all(trial):
                    trial.verdict = Verdict.STANDS
                else:
                    continue
                trial.taken = self.gradients.take(trial.chunk)
                if trial.is_done:
                    self._close(trial)
            decided.add(index)
        self._open = {i: trial for i, trial in self._open.items() if i not in decided}
        self.take_back()
        return decided

    def _was_all(self, trial: Trial) -> bool:
        """Whether no more gradients came for the chunk after its trial had been asked for."""
        return self.gradients.of[trial.chunk.index].parts == trial.parts

    def take_back(self) -> None:
        """Let everything be as if no update had begun."""
        trials, self._open = list(self._open.values()), {}
        self._take_back(trials)

    def take_back_one(self, chunk: Chunk) -> None:
        """The backward pass needs the weights of ``chunk`` again."""
        if chunk.index in self._open:
            self._take_back([self._open.pop(chunk.index)])

    def _take_back(self, trials: list[Trial]) -> None:
        for trial in trials:
            with self._lock:
                if not trial.is_begun:
                    trial.verdict = Verdict.OFF
        for trial in trials:
            self.manager.worker.wait(trial.chunk.index)
            if trial.undo is not None:
                self._restore(trial)
            self.buffers.put(trial.buffer)

    def _restore(self, trial: Trial) -> None:
        assert trial.undo is not None
        self.manager.timeline.note("undo", trial.chunk)
        with self.updates.second.steady(self.updates.members.pieces(trial.chunk)):
            trial.undo.restore()
        trial.undo = None


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """``method``, as long as somebody else holds its object: hooks of parameters, which no garbage collector sees into, hold tiers."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call


def can_take_back(optim: Any) -> bool:
    """Whether updates take a factor for the gradients, and leave them as they are [Note: what is not tried]."""
    return isinstance(optim, MultiTensorOptimizer) and optim.divides


def same(some: Options, others: Options) -> bool:
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
