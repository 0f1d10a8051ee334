"""Where every chunk was during a step."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_manager import ChunkManager


@dataclass(frozen=True)
class Event:
    """``kind``: fetch, drop, grads (sent home), update or updated; ``when`` in seconds since the step began."""

    when: float
    kind: str
    chunk: int


class Timeline:
    """The events of the current step and of the one before."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self.events: list[Event] = []
        self.last: list[Event] = []
        self._start = perf_counter()

    def begin(self) -> None:
        self.last, self.events = self.events, []
        self._start = perf_counter()

    def end(self) -> None:
        pass

    def note(self, kind: str, chunk: Chunk) -> None:
        self.events.append(Event(perf_counter() - self._start, kind, chunk.index))
