"""The inputs of a step, in tensors that are made once: so a step may be compiled, or recorded as a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossalai.inference.scheduler import MOST_SCORED, Part
from colossalai.nn.attention.pages import Places


class Columns:
    """Whole numbers that go to the device together: written here by name, read there as views.

    Args:
        lengths: the most numbers of each column.
    """

    def __init__(self, lengths: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
        total = sum(lengths.values())
        self._host = torch.zeros(total, dtype=dtype, pin_memory=device.type == "cuda")
        self._there = self._host if device.type == "cpu" else torch.zeros(total, dtype=dtype, device=device)
        self.host: dict[str, Tensor] = {}
        self.there: dict[str, Tensor] = {}
        start = 0
        for name, length in lengths.items():
            self.host[name] = self._host[start : start + length]
            self.there[name] = self._there[start : start + length]
            start += length

    def write(self, name: str, values: Sequence[int]) -> None:
        """Set the first numbers of a column."""
        self.host[name][: len(values)] = torch.tensor(values, dtype=self._host.dtype)

    def send(self) -> None:
        """Copy all columns to the device."""
        if self._there is not self._host:
            self._there.copy_(self._host, non_blocking=True)


class StepInputs:
    """What the model is given in a step, on its device.

    ``tokens`` and ``positions`` (tokens of the step), ``places`` of these, and ``rows``: the packed tokens
    whose scores are wanted, first those from which tokens are chosen, then those of prompts.
    """

    def __init__(self, device: torch.device, *, max_requests: int, chunk: int, max_pages: int) -> None:
        self.device = device
        most_rows = max_requests + MOST_SCORED
        self._long = Columns(
            {"tokens": chunk, "positions": chunk, "slots": chunk, "rows": most_rows}, torch.int64, device
        )
        self._short = Columns(
            {"query_starts": max_requests + 1, "lengths": max_requests}, torch.int32, device
        )
        pinned = device.type == "cuda"
        self._table_host = torch.zeros(max_requests, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._table = (
            self._table_host if device.type == "cpu" else torch.zeros_like(self._table_host, device=device)
        )
        self._in_table: list[list[int]] = [[] for _ in range(max_requests)]
        self.count = self.sequences = self.chosen = self.scored = 0
        self.max_query = 0
        self._sent = torch.cuda.Event() if pinned else None

    def fill(self, parts: Sequence[Part], page_size: int) -> None:
        """Take what a step computes."""
        if self._sent is not None:
            self._sent.synchronize()  # the last copies have read what is written now
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        scored: list[int] = []
        starts = [0]
        for part in parts:
            request, end = part.request, part.start + part.count
            first = len(tokens)
            tokens += request.tokens[part.start : end]
            positions += range(part.start, end)
            slots += [
                request.pages[at // page_size] * page_size + at % page_size for at in range(part.start, end)
            ]
            starts.append(len(tokens))
            if part.chooses:
                rows.append(starts[-1] - 1)
            begin = first + request.scored - part.start
            scored += range(begin, begin + part.scores)
        for name, values in (("tokens", tokens), ("positions", positions), ("slots", slots)):
            self._long.write(name, values)
        self._long.write("rows", rows + scored)
        self._short.write("query_starts", starts)
        self._short.write("lengths", [part.start + part.count for part in parts])
        self._fill_table(parts)
        self._long.send()
        self._short.send()
        if self._sent is not None:
            self._sent.record()
        self.count, self.sequences = len(tokens), len(parts)
        self.chosen, self.scored = len(rows), len(scored)
        self.max_query = max(part.count for part in parts)

    def _fill_table(self, parts: Sequence[Part]) -> None:
        """The pages of each sequence; a row that is there already is not written again."""
        changed = False
        for row, part in enumerate(parts):
            pages = part.request.pages
            if self._in_table[row] != pages:
                self._in_table[row] = list(pages)
                self._table_host[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                changed = True
        if changed and self._table is not self._table_host:
            self._table.copy_(self._table_host, non_blocking=True)

    @property
    def tokens(self) -> Tensor:
        return self._long.there["tokens"][: self.count]

    @property
    def positions(self) -> Tensor:
        return self._long.there["positions"][: self.count]

    @property
    def rows(self) -> Tensor:
        return self._long.there["rows"][: self.chosen + self.scored]

    def places(self) -> Places:
        """Where the tokens belong."""
        return Places(
            self._long.there["slots"][: self.count],
            self._table[: self.sequences],
            self._short.there["query_starts"][: self.sequences + 1],
            self._short.there["lengths"][: self.sequences],
            self.max_query,
        )
