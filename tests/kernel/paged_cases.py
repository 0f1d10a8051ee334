"""Packed queries and pages, for tests of attention to pages on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossalai.kernel import paged_attention as pages

PAGE = 4


@dataclass
class Case:
    """Sequences with queries and keys, and how they attend."""

    queries: list[int]
    lengths: list[int]
    heads: int
    shared: int
    width: int
    alibi: bool = False
    window: int | None = None
    exact: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    value_width: int | None = None
    """Where it is not that of the keys."""
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        torch.manual_seed(sum(self.queries) + 7 * sum(self.lengths))
        need = [-(-length // PAGE) for length in self.lengths]
        free = iter(torch.randperm(sum(need) + 3).tolist())
        table = torch.zeros(len(need), max(need) + 2, dtype=torch.int32)
        for row, number in zip(table, need, strict=True):
            row[:number] = torch.tensor([next(free) for _ in range(number)])
        query = torch.randn(sum(self.queries), self.heads, self.width)
        keys, values = (
            torch.randn(sum(need) + 3, PAGE, self.shared, width)
            for width in (self.width, self.value_width or self.width)
        )
        starts = torch.tensor([0, *self.queries]).cumsum(0).int()
        found = (
            *(t.to(self.dtype) for t in (query, keys, values)),
            table,
            starts,
            torch.tensor(self.lengths).int(),
        )
        self.tensors = tuple(t.to(self.device) for t in found)

    @property
    def slopes(self) -> Tensor | None:
        """A column of what a model adds to its scores, so not contiguous."""
        return torch.rand(self.heads, 3, device=self.device)[:, 1] if self.alibi else None

    def run(self, slopes: Tensor | None) -> Tensor:
        return pages.paged_attention(
            *self.tensors, **self._options(slopes), max_query=max(self.queries), exact=self.exact
        )

    def truth(self, slopes: Tensor | None) -> Tensor:
        """The same in float64, from the definition of attention."""
        query, keys, values, table, starts, lengths = (
            t.double() if t.is_floating_point() else t.tolist() for t in self.tensors
        )
        scale, out = self.width**-0.5, query.new_zeros(*query.shape[:2], values.shape[-1])
        for row, length in enumerate(lengths):
            for token in range(starts[row], starts[row + 1]):
                place = length - (starts[row + 1] - token)
                seen = range(max(0, place + 1 - (self.window or length)), place + 1)
                for head in range(self.heads):
                    own = head * self.shared // self.heads
                    key, value = (
                        torch.stack([t[table[row][i // PAGE], i % PAGE, own] for i in seen])
                        for t in (keys, values)
                    )
                    score = key @ query[token, head] * scale
                    if slopes is not None:
                        score += slopes[head].double() * torch.tensor(list(seen), device=score.device)
                    out[token, head] = score.softmax(0) @ value
        return out

    def _options(self, slopes: Tensor | None) -> dict[str, Any]:
        return {"scale": self.width**-0.5, "alibi": slopes, "window": self.window}


CASES = [
    Case([1, 1, 1], [5, 70, 1], 4, 4, 64),
    Case([1, 1], [33, 130], 4, 2, 64),
    Case([1, 1], [33, 40], 4, 2, 80, alibi=True),
    Case([1, 1], [33, 100], 2, 2, 80, alibi=True, window=40),
    Case([5, 1, 20, 0], [5, 70, 40, 9], 4, 2, 64, window=9),
    Case([5, 1, 20], [5, 30, 40], 4, 4, 96, alibi=True),
    Case([3, 1], [33, 20], 2, 1, 256),
    Case([1], [1100], 20, 1, 16),
    Case([1, 1, 1], [5, 40, 1], 4, 2, 8),  # narrower than a tile of Triton can be
    Case([5, 1, 20], [5, 30, 40], 4, 2, 8, alibi=True, window=7),
    Case([1], [1100], 4, 1, 12),
    Case([5, 1], [9, 30], 4, 4, 24, value_width=16),  # latent attention (DeepSeek)
    Case([1], [1100], 4, 1, 12, value_width=40),
    Case([7, 1], [9, 30], 4, 2, 24, value_width=8, exact=True),
    Case([7, 1], [9, 30], 4, 4, 12, exact=True),
    Case([1, 1], [33, 50], 4, 2, 64, exact=True),
    Case([7, 1], [33, 50], 2, 2, 128, exact=True, alibi=True),
]


def compare(case: Case) -> None:
    slopes = case.slopes
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.run(slopes).double(), case.truth(slopes), atol=tolerance, rtol=tolerance)
