"""Tokens are drawn from the distribution that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from colossalai.inference import Sampling
from colossalai.inference.sampling import SamplingRows, choose, log_probabilities

WORDS = 24
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"temperature": 1.6, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 0.6},
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 3.0},
    {"top_k": 1},
    {"top_p": 1e-6},
]


def expected(logits: Tensor, options: dict[str, Any], seen: list[int]) -> Tensor:
    """The probabilities that transformers draws from."""
    ids, scores = torch.tensor([seen]), logits[None].clone()
    if (penalty := options.get("repetition_penalty")) is not None:
        scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    temperature = options.get("temperature", 1.0)
    if temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), WORDS).float()
    for kind, name in (
        (TemperatureLogitsWarper, "temperature"),
        (TopKLogitsWarper, "top_k"),
        (TopPLogitsWarper, "top_p"),
        (MinPLogitsWarper, "min_p"),
    ):
        if name in options:
            scores = kind(options[name])(ids, scores)
    return scores[0].softmax(-1)


def test_draws_follow_the_distribution() -> None:
    """Rows with other wishes stand side by side, and each gets its own."""
    draws = 4000
    logits = torch.randn(WORDS, generator=torch.Generator().manual_seed(0)) * 2
    seen = [1, 5, 7]
    asked = [Sampling(seed=seed, **options) for options in CASES for seed in range(draws)]
    rows = SamplingRows.of(asked, WORDS, torch.device("cpu"))
    marks = torch.zeros(WORDS, dtype=torch.bool)
    marks[seen] = True
    many = len(asked)
    found = choose(logits.expand(many, -1), rows, torch.full((many,), 3), marks.expand(many, -1)).unflatten(
        0, (len(CASES), draws)
    )
    for options, tokens in zip(CASES, found, strict=True):
        frequencies = torch.bincount(tokens, minlength=WORDS) / draws
        wanted = expected(logits, options, seen)
        assert float((frequencies - wanted).abs().max()) < 0.035, options
        assert frequencies[wanted == 0].sum() == 0, options


def test_numbers_too_small_for_fp32_take_the_most_likely_token() -> None:
    torch.manual_seed(0)
    logits = 30 * torch.randn(6, WORDS)
    small = [{"temperature": 1e-320}, {"temperature": 1e-38}, {"top_p": 1e-320}]
    small += [{"temperature": 1e-320, "repetition_penalty": r} for r in (1e-3, 1e3)] + [{"top_p": 1e-38}]
    asked = [Sampling(seed=i, **options) for i, options in enumerate(small)]
    rows = SamplingRows.of(asked, WORDS, torch.device("cpu"))
    found = choose(logits, rows, torch.arange(6), torch.zeros(6, WORDS, dtype=torch.bool))
    assert found.tolist() == logits.argmax(-1).tolist()


def test_one_request_draws_other_numbers_at_every_place() -> None:
    logits = torch.zeros(500, WORDS)
    rows = SamplingRows.of([Sampling(seed=1)] * 500, WORDS, torch.device("cpu"))
    drawn = choose(logits, rows, torch.arange(500))
    counts = torch.bincount(drawn, minlength=WORDS)
    assert (counts > 0).all()
    assert ((drawn[1:] == drawn[:-1]).float().mean() - 1 / WORDS).abs() < 0.03


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_give_no_token(value: float) -> None:
    logits = torch.zeros(4, WORDS)
    logits[1, 3] = value
    logits[2] = float("-inf")
    logits[3, :5] = float("-inf")  # some words may be shut out
    asked = [Sampling(seed=1), Sampling(temperature=0), Sampling(seed=1), Sampling(seed=1)]
    tokens = choose(logits, SamplingRows.of(asked, WORDS, torch.device("cpu")), torch.arange(4))
    assert tokens[1] == tokens[2] == -1
    assert tokens[0] >= 0
    assert tokens[3] >= 5


def test_log_probabilities() -> None:
    logits = torch.randn(3, WORDS)
    tokens = torch.tensor([2, 0, 9])
    own, top, values = log_probabilities(logits, tokens, 4)
    table = logits.log_softmax(-1)
    torch.testing.assert_close(own.float(), table[range(3), tokens])
    torch.testing.assert_close(values.float(), table.topk(4).values)
    assert torch.equal(top, table.topk(4).indices)
