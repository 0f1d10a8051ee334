"""Sampling from a model."""

from __future__ import annotations

import pytest
import torch

from titans.model.gpt import GPT
from titans.utils import generate


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(20, 6, 16, 2, 2)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


START = torch.tensor([[3, 1], [4, 1]])


def test_greedy_is_the_argmax_of_the_full_forward(model: GPT) -> None:
    out = generate(model, START, 10, temperature=0)
    assert out.shape == (2, 12)
    assert torch.equal(out[:, :2], START)
    model.eval()
    for t in range(2, 12):  # beyond 6 tokens the model sees the last 6
        assert torch.equal(out[:, t], model(out[:, max(0, t - 6) : t])[:, -1].argmax(-1))
    assert torch.equal(generate(model, START, 10, temperature=1.0, top_k=1), out)


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model: GPT) -> None:
    state = torch.get_rng_state()
    first = generate(model, START, 20, seed=1)
    assert torch.equal(first, generate(model, START, 20, seed=1))
    assert not torch.equal(first, generate(model, START, 20, seed=2))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(generate(model, START, 20), generate(model, START, 20))


def test_draws_follow_the_distribution(model: GPT) -> None:
    model.eval()
    start = torch.tensor([[3, 1]]).expand(4000, 2)
    probabilities = (model(start[:1])[0, -1] / 2).softmax(-1)
    top = probabilities.topk(5)
    drawn = generate(model, start, 1, temperature=2, top_k=5, seed=0)[:, -1]
    frequencies = torch.bincount(drawn, minlength=20) / 4000
    expected = torch.zeros(20).scatter(0, top.indices, top.values / top.values.sum())
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.03)
    assert frequencies[expected == 0].sum() == 0


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_kept(model: GPT, training: bool) -> None:
    model.train(training)
    generate(model, START, 1)
    assert model.training is training


def test_bad_arguments_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match=r"at least one token to start from, got shape \(1, 0\)"):
        generate(model, torch.zeros(1, 0, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"max_new_tokens must be 0 or more, got -1"):
        generate(model, START, -1)
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or more, got -0\.5"):
        generate(model, START, 1, temperature=-0.5)
    with pytest.raises(ValueError, match=r"top_k must be at least 1, or None for all tokens, got 0"):
        generate(model, START, 1, top_k=0)
