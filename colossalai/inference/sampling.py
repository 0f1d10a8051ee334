"""Tokens from scores, on the device of the scores.

The random number of a token is a function of the seed of its request and of the token's position, so it does
not depend on the plan, on the other requests, or on whether the request was computed again.  A token is
drawn by inversion: tokens stand in the order of their numbers, each as wide as its probability, and the
random number points at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossalai.inference.requests import Sampling
from colossalai.mesh import random_key
from colossalai.mesh.random import fine_uniform_numbers, signed_key

_LEAST = 1e-30
"""Of temperature and ``top_p``: less asks for the same, but is 0, or divides to infinity, in fp32."""


@dataclass(eq=False)
class SamplingRows:
    """How the tokens of the rows of scores are chosen; a field that no row needs is None."""

    keys: Tensor | None
    """(rows,) of random numbers; None if all rows are greedy."""
    temperature: Tensor
    greedy: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    penalty: Tensor | None

    @classmethod
    def of(cls, asked: Sequence[Sampling], vocabulary: int, device: torch.device) -> SamplingRows:
        """A row for each of ``asked``."""

        def column(values: list[float], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        keys = None
        if not all(s.greedy for s in asked):
            numbers = [signed_key(random_key(s.seed or 0, "token")) for s in asked]
            keys = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
        temperature = torch.tensor([max(s.temperature or 1.0, _LEAST) for s in asked], dtype=torch.float32)
        greedy = torch.tensor([s.greedy for s in asked], dtype=torch.bool)
        top_k = [min(s.top_k, vocabulary) or vocabulary for s in asked]
        return cls(
            keys,
            temperature.to(device, non_blocking=True),
            greedy.to(device, non_blocking=True),
            column([float(k) for k in top_k], vocabulary, torch.int64),
            column([max(s.top_p, _LEAST) for s in asked], 1.0, torch.float32),
            column([s.min_p for s in asked], 0.0, torch.float32),
            column([s.repetition_penalty for s in asked], 1.0, torch.float32),
        )


def choose(logits: Tensor, rows: SamplingRows, positions: Tensor, seen: Tensor | None = None) -> Tensor:
    """A token for each row of ``logits`` (rows, vocabulary); -1 where scores are no numbers.

    Args:
        positions: (rows,), the places of the tokens that are chosen.
        seen: (rows, vocabulary), True for tokens in the text of a row; needed for penalties.
    """
    logits = logits.float()
    bad = ~logits.amax(-1).isfinite()
    if rows.penalty is not None:
        assert seen is not None
        penalty = rows.penalty[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    tokens = logits.argmax(-1)
    if rows.keys is not None:
        number = fine_uniform_numbers(rows.keys, positions)
        drawn = _draw(_filtered(logits / rows.temperature[:, None], rows), number)
        tokens = torch.where(rows.greedy, tokens, drawn)
    return tokens.masked_fill(bad, -1)


def _filtered(logits: Tensor, rows: SamplingRows) -> Tensor:
    """``logits`` with minus infinity for tokens that do not pass."""
    lowest = float("-inf")
    if rows.top_k is not None or rows.top_p is not None:
        ordered = logits.sort(-1, descending=True).values
        if rows.top_k is not None:
            least = ordered.gather(-1, rows.top_k[:, None] - 1)
            logits = logits.masked_fill(logits < least, lowest)
            ordered = ordered.masked_fill(ordered < least, lowest)
        if rows.top_p is not None:
            shares = _shares(ordered)
            ends = shares.cumsum(-1)
            before = (ends - shares).double()  # the most likely token always passes
            passing = before < rows.top_p[:, None].double() * ends[:, -1:]
            least = ordered.masked_fill(~passing, float("inf")).amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < least, lowest)
    if rows.min_p is not None:
        least = logits.amax(-1, keepdim=True) + rows.min_p[:, None].log()
        logits = logits.masked_fill(logits < least, lowest)
    return logits


def _draw(logits: Tensor, number: Tensor) -> Tensor:
    """The token that ``number`` (rows,) in [0, 1) points at."""
    ends = _shares(logits).cumsum(-1)
    target = (number * ends[:, -1]).long()
    return (ends <= target[:, None]).sum(-1).clamp(max=logits.shape[-1] - 1)


def _shares(logits: Tensor) -> Tensor:
    """Probabilities as whole numbers, whose sums do not depend on the order in which a device adds them."""
    return (logits.softmax(-1).double() * 2.0**50).long()


def log_probabilities(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of ``tokens`` (rows,), and the ``most`` likely tokens of each row with theirs.

    Returns float64 (rows,), int64 (rows, most) and float64 (rows, most).
    """
    found = logits.float().log_softmax(-1)
    own = found.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    values, top = found.topk(most, -1) if most else (found[:, :0], tokens[:, None][:, :0])
    return own.double(), top, values.double()
