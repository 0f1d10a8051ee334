"""The timeline of a step: where every chunk was, what moved, and how much computation hid of it.

Events are noted by the clock of the host, always: they cost next to nothing.  How long copies take and how
long computation waits for them only the device knows; with ``timeline.timed = True`` the steps that follow
ask it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from colossalai.zero.gemini.chunk import Chunk
from colossalai.zero.gemini.chunk_manager import ChunkManager

Interval = tuple[float, float]
# what begins and what ends an interval of a chunk
INTERVALS = {"present": ("fetch", "drop"), "update": ("update", "updated")}


@dataclass(frozen=True)
class ChunkEvent:
    """An event in the life of a chunk; ``when`` in seconds since the step began.

    ``kind``: fetch, drop (evicted), grads (reduced and sent home), update, updated, try (a speculative
    update) or undo (its rollback).
    """

    when: float
    kind: str
    chunk: int
    home: str


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step.

    ``copying`` and ``waiting`` are seconds of the device: of all copies, and of computation that waited for
    them.
    """

    seconds: float
    bytes_up: int
    bytes_down: int
    peak: dict[str, int]
    copying: float = 0.0
    waiting: float = 0.0
    updating: float = 0.0
    """Seconds in which the host updated chunks."""
    blocked: float = 0.0
    """Seconds in which the script waited for an update."""
    tried: int = 0
    """Speculative updates in the backward pass."""
    undone: int = 0
    """Speculative updates that were rolled back."""

    @property
    def hidden(self) -> float | None:
        """The share of all copies that computation did not wait for; None if copies were not timed."""
        return None if not self.copying else max(0.0, 1 - self.waiting / self.copying)

    def __str__(self) -> str:
        shares = "not measured" if self.hidden is None else f"{self.hidden:.0%} hidden"
        tiers = ", ".join(f"{name} {nbytes / 2**20:,.1f} MB" for name, nbytes in self.peak.items())
        extra = f" ({self.tried} speculative, {self.undone} of them rolled back)" if self.tried else ""
        return (
            f"{self.seconds:.3f} s; {self.bytes_up / 2**20:,.1f} MB to the compute tier,"
            f" {self.bytes_down / 2**20:,.1f} MB back ({shares}); host updates {self.updating:.3f} s, of"
            f" which the script waited {self.blocked:.3f} s{extra}; most in use: {tiers}"
        )


class Timeline:
    """Notes the events of the current step, and keeps those of the one before (``last``)."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.chunks = chunks
        self.events: list[ChunkEvent] = []
        self.last: list[ChunkEvent] = []
        self.last_numbers: StepNumbers | None = None
        self.blocked = 0.0
        self._start: float | None = None
        self._before = (0, 0)

    @property
    def timed(self) -> bool:
        return self.chunks.copier.timed

    @timed.setter
    def timed(self, value: bool) -> None:
        self.chunks.copier.timed = value

    def begin(self) -> None:
        """Start a step, and sum up the one before, whose updates have been asked for."""
        now = perf_counter()
        if self._start is not None:
            self.last_numbers = self._numbers(now - self._start)
        self.last, self.events = self.events, []
        self._start, self.blocked = now, 0.0
        self._before = (self.chunks.bytes_up, self.chunks.bytes_down)

    def note(self, kind: str, chunk: Chunk) -> None:
        home = chunk.home.name if chunk.home is not None else ""
        self.events.append(ChunkEvent(perf_counter() - (self._start or 0.0), kind, chunk.index, home))

    def _numbers(self, seconds: float) -> StepNumbers:
        up, down = self._before
        copying, waiting = self.chunks.copier.times()
        return StepNumbers(
            seconds=seconds,
            bytes_up=self.chunks.bytes_up - up,
            bytes_down=self.chunks.bytes_down - down,
            peak={tier.name: tier.peak for tier in self.chunks.tiers},
            copying=copying,
            waiting=waiting,
            updating=sum(b - a for _, a, b in _intervals(self.events, "update", seconds)),
            blocked=self.blocked,
            tried=sum(event.kind == "try" for event in self.events),
            undone=sum(event.kind == "undo" for event in self.events),
        )

    def numbers(self) -> StepNumbers:
        """Return the numbers of the last whole step."""
        if self.last_numbers is None:
            raise RuntimeError(
                "the timeline of a step is known when the next one has begun; train two steps first"
            )
        return self.last_numbers

    def intervals(self, kind: str) -> dict[int, list[Interval]]:
        """Return when, in the last step, each chunk was ``"present"`` on the compute tier or in an
        ``"update"``.
        """
        found: dict[int, list[Interval]] = {}
        for chunk, start, end in _intervals(self.last, kind, self.numbers().seconds):
            found.setdefault(chunk, []).append((start, end))
        return found

    def table(self) -> str:
        """Return a table: home, how often and how long on the compute tier, when updated; and sums."""
        present, updates = self.intervals("present"), self.intervals("update")
        seconds = self.numbers().seconds
        lines = [
            f"{'chunk':>5} {'home':>8} {'MB':>8} {'fetched':>8} {'present':>8} {'updated at':>11}  first"
            " parameter"
        ]
        for chunk in self.chunks.chunks:
            stays = chunk.resident
            times = present.get(chunk.index, [])
            share = 1.0 if stays else sum(b - a for a, b in times) / max(seconds, 1e-9)
            when = ", ".join(f"{a:.3f}-{b:.3f}" for a, b in updates.get(chunk.index, [])) or "-"
            home = chunk.home.name if chunk.home is not None else "-"
            lines.append(
                f"{chunk.index:5} {home:>8} {chunk.nbytes / 2**20:8.2f} {len(times):8} {share:8.0%}"
                f" {when:>11}  {chunk.slots[0].name}"
            )
        return "\n".join([*lines, str(self.numbers())])

    def picture(self, path: str | Path) -> Path:
        """Draw the last whole step: a row for each chunk, filled while it is on the compute tier and while
        the host updates it.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        seconds, chunks = self.numbers().seconds, self.chunks.chunks
        figure, axes = pyplot.subplots(figsize=(11, 2 + 0.16 * len(chunks)))
        bars: dict[str, Any] = {"present": ("tab:blue", 0.8), "update": ("tab:orange", 0.35)}
        for kind, (color, height) in bars.items():
            found = self.intervals(kind)
            for chunk in chunks:
                spans = found.get(chunk.index, [])
                if kind == "present" and chunk.resident:
                    spans = [(0.0, seconds)]
                widths = [(a, b - a) for a, b in spans]
                axes.broken_barh(widths, (chunk.index - height / 2, height), facecolors=color)
        sent = [(e.when, e.chunk) for e in self.last if e.kind == "grads"]
        if sent:
            axes.plot(*zip(*sent, strict=True), ".", color="tab:green", markersize=4)
        axes.set(
            xlabel="seconds since the step began",
            ylabel="chunk",
            xlim=(0, seconds),
            ylim=(len(chunks) - 0.5, -0.5),
        )
        axes.set_title("blue: on the compute tier, orange: updated on the host, green: gradients sent")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        return Path(path)


def _intervals(events: list[ChunkEvent], kind: str, end: float) -> Iterator[tuple[int, float, float]]:
    begins, ends = INTERVALS[kind]
    open_: dict[int, float] = {}
    for event in sorted(events, key=lambda e: e.when):
        if event.kind == begins:
            open_.setdefault(event.chunk, event.when)
        elif event.kind == ends:
            yield event.chunk, open_.pop(event.chunk, 0.0), event.when
    for chunk, start in open_.items():
        yield chunk, start, end
