"""Steps in which every request writes one token: recorded as CUDA graphs, and one ahead of the host.

Such a step needs nothing from the host but new pages: its tokens are those that the step before chose, and
positions, slots and lengths follow on the device.  So the host starts a step before it has read the tokens of
the one before, and finds out one step late that a request has ended; what was computed for it is dropped.
Requests keep their rows while steps follow each other, so one that has ended leaves a row that does nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from colossalai.inference.results import Results
from colossalai.inference.runner import Runner
from colossalai.inference.sampling import SamplingRows, choose
from colossalai.inference.scheduler import Part, Scheduler
from colossalai.inference.watch import ModelWatch
from colossalai.kernel.thin_products import Product, ThinProducts
from colossalai.nn.attention.pages import Places

_LADDER = sorted({1, 2, *(n for k in range(2, 16) for n in (2**k, 3 * 2 ** (k - 1)))})
"""Numbers of rows for which steps are recorded."""


@dataclass(eq=False)
class Flight:
    """A step that was started."""

    parts: list[Part]
    rows: list[int]
    """The row of each part."""
    size: int
    results: Results
    numbers: Tensor
    """What it gives, on the host after ``landed``."""
    landed: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """The numbers, after the step."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.numbers


class _Rows:
    """The inputs of a step of ``size`` rows, which stay on the device from step to step."""

    def __init__(self, size: int, max_pages: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.size = size
        self.tokens, self.positions, self.chosen = zeros(size), zeros(size), zeros(size)
        self.table = zeros(size + 1, max_pages, dtype=torch.int32)  # updates of no row go to the last
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        # for each row: where in the table a page is new, the page, and whether the row has a request
        self.updates = zeros(4, size)
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(4, size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        vocabulary = zeros(size)
        self.sampling = SamplingRows(
            zeros(size),
            torch.ones(size, device=device),
            torch.ones(size, dtype=torch.bool, device=device),
            vocabulary,
            torch.ones(size, device=device),
            zeros(size, dtype=torch.float32),
            None,
        )

    def fill(self, parts: Sequence[Part], sampling: SamplingRows, vocabulary: int) -> None:
        """Take requests whose tokens the host knows, in rows from the first on."""
        count, device = len(parts), self.tokens.device
        self.tokens[:count] = torch.tensor([p.request.tokens[p.start] for p in parts]).to(device)
        self.positions.zero_()
        self.positions[:count] = torch.tensor([p.start for p in parts]).to(device)
        longest = max(len(p.request.pages) for p in parts)
        table = torch.zeros(count, longest, dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part.request.pages)] = torch.tensor(part.request.pages, dtype=torch.int32)
        self.table[:count, :longest] = table.to(device)
        self.sampling.top_k.fill_(vocabulary)  # type: ignore[union-attr]
        for field in fields(SamplingRows):
            given, own = getattr(sampling, field.name), getattr(self.sampling, field.name)
            if given is not None and own is not None:
                own[:count] = given
        self.stage(range(count), [])

    def stage(self, active: Sequence[int], pages: Sequence[tuple[int, int, int]]) -> None:
        """Send what changes before the next step: new ``pages`` as (row, place in its table, page)."""
        self._turn ^= 1  # the copy from the other one may be under way
        staged = self._staged[self._turn]
        staged.zero_()
        staged[0] = self.size
        if pages:
            staged[:3, : len(pages)] = torch.tensor(pages).mT
        staged[3, list(active)] = 1
        self.updates.copy_(staged, non_blocking=True)


class DecodeLoop:
    """Runs steps of one token for each request, for a model that is whole on this rank.

    Args:
        record: whether steps become CUDA graphs; without, they run as they are written.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        watch: ModelWatch,
        device: torch.device,
        *,
        max_requests: int,
        max_pages: int,
        exact: bool,
        record: bool,
    ) -> None:
        self._runner, self._scheduler, self._device = runner, scheduler, device
        self._max_pages, self._exact, self._record = max_pages, exact, record
        self._sizes = [n for n in _LADDER if n < max_requests]
        self._sizes.append(max_requests)
        self._rows: dict[int, _Rows] = {}
        self._steps: dict[tuple[Any, ...], tuple[Callable[[], None], Tensor]] = {}
        self._watch, self._moves = watch, watch.moves
        self._products: list[Product] = []  # of a step of one row
        self._pool: Any = None
        self._sampling: tuple[tuple[int, ...], SamplingRows] | None = None

    def prepare(self) -> None:
        """Record a step of each size, in which tokens are chosen greedily; other choices are recorded as they
        come.
        """
        for size in reversed(self._sizes):
            rows = self._rows_of(size)
            rows.stage([], [])
            sampling = replace(rows.sampling, keys=None, top_k=None, top_p=None, min_p=None)
            self._steps[_key(size, sampling)] = self._make(rows, sampling)
            if not self._record:
                return

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether a step of ``parts`` is of this kind."""
        return len(parts) <= self._sizes[-1] and all(
            p.chooses and p.count == 1 and not p.scores and p.request.sampling.repetition_penalty == 1.0
            for p in parts
        )

    def begin(self, parts: Sequence[Part]) -> Flight:
        """Start a step of requests whose tokens are known."""
        if self._moves != self._watch.moves:
            self._moves = self._watch.moves
            self._steps.clear()
            self._products.clear()
        size = self._size(len(parts))
        rows = self._rows_of(size)
        requests = [part.request for part in parts]
        serials = tuple(request.serial for request in requests)
        if self._sampling is None or self._sampling[0] != serials:
            self._sampling = (
                serials,
                SamplingRows.of(
                    [request.sampling for request in requests], self._runner.vocabulary, self._device
                ),
            )
        sampling = self._sampling[1]
        rows.fill(parts, sampling, self._runner.vocabulary)
        key = _key(size, sampling)
        if key not in self._steps:
            self._steps[key] = self._make(rows, sampling)
            rows.fill(parts, sampling, self._runner.vocabulary)  # a trial has moved on
        return self._start(list(parts), list(range(len(parts))), key)

    def ahead(self, flight: Flight) -> Flight | None:
        """Start the step after ``flight``, whose tokens are not known yet; None if it needs the host."""
        scheduler = self._scheduler
        if (scheduler.waiting and scheduler.has_seat) or self._moves != self._watch.moves:
            return None
        pairs = [
            (Part(part.request, part.start + 1, 1, True), row)
            for part, row in zip(flight.parts, flight.rows, strict=True)
            if part.request.finish is None and not scheduler.ends_with_next(part.request)
        ]
        if not pairs or 2 * self._size(len(pairs)) <= flight.size:  # rows that do nothing cost little
            return None
        parts, kept = [part for part, _ in pairs], [row for _, row in pairs]
        grown = scheduler.extend([(part.request, part.start + 1) for part in parts])
        if grown is None:
            return None
        row_of = {part.request.serial: row for part, row in pairs}
        self._rows[flight.size].stage(kept, [(row_of[serial], place, page) for serial, place, page in grown])
        return self._start(parts, kept, self._last)

    def close(self) -> None:
        """Let go of graphs and their memory."""
        self._steps.clear()
        self._rows.clear()

    # ---- a step ----

    def _start(self, parts: list[Part], kept: list[int], key: tuple[Any, ...]) -> Flight:
        self._last = key
        run, scores = self._steps[key]
        run()
        results, rows = Results(parts), self._rows[key[0]]
        chosen = rows.chosen
        if kept == list(range(len(kept))):
            chosen, scores = chosen[: len(kept)], scores[: len(kept)]
        else:
            at = torch.tensor(kept).to(self._device, non_blocking=True)
            chosen, scores = chosen[at], scores[at] if results.length > len(parts) else scores
        numbers = results.pack(scores, chosen)
        if not self._record:
            return Flight(parts, kept, key[0], results, numbers.cpu(), None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return Flight(parts, kept, key[0], results, host, landed)

    def _make(self, rows: _Rows, sampling: SamplingRows) -> tuple[Callable[[], None], Tensor]:
        """A step of ``rows``, as a function, and where it leaves its scores."""
        unused: dict[str, Any] = {
            f.name: None for f in fields(SamplingRows) if getattr(sampling, f.name) is None
        }
        own = replace(rows.sampling, **unused)
        if self._record:
            try:
                return self._recorded(rows, own)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                warnings.warn(
                    f"the steps of {type(self._runner.model).__name__} cannot be recorded as CUDA graphs, and"
                    f" run several times slower ({reason})",
                    stacklevel=2,
                )
                self._record = False
        scores = torch.zeros(rows.size, self._runner.vocabulary, device=self._device)

        def run() -> None:
            scores.copy_(self._body(rows, own))

        return run, scores

    def _recorded(self, rows: _Rows, sampling: SamplingRows) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._body(rows, sampling)  # kernels are compiled, and libraries take their memory
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            scores = self._body(rows, sampling)
        return graph.replay, scores

    def _body(self, rows: _Rows, sampling: SamplingRows) -> Tensor:
        """What a step computes, all on the device; its scores."""
        page_size = self._scheduler.pool.page_size
        row, place, page, alive = rows.updates.unbind(0)
        rows.table.index_put_((row, place), page.int())
        active = alive != 0
        position = torch.where(active, rows.positions, 0)
        table = rows.table[: rows.size]
        pages = table.gather(1, (position // page_size)[:, None])[:, 0].long()
        slots = torch.where(active, pages * page_size + position % page_size, -1)
        lengths = torch.where(active, position + 1, 0).int()
        places = Places(slots, table, rows.starts, lengths, 1)
        with nullcontext() if self._exact else ThinProducts(self._products):
            scores = self._runner.decode(rows.tokens, position, places)
        chosen = choose(scores, sampling, position + 1)
        rows.chosen.copy_(chosen)
        rows.tokens.copy_(chosen.clamp(min=0))
        rows.positions.add_(1)
        return scores

    def _rows_of(self, size: int) -> _Rows:
        if size not in self._rows:
            self._rows[size] = _Rows(size, self._max_pages, self._device)
        return self._rows[size]

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)


def _key(size: int, sampling: SamplingRows) -> tuple[Any, ...]:
    """What tells apart steps that are recorded."""
    return size, *(getattr(sampling, f.name) is not None for f in fields(SamplingRows))
