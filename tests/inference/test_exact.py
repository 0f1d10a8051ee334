"""With ``exact=True``, what a request gets does not depend on the others, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import colossalai
from colossalai.inference import Completion, Generator, Sampling
from colossalai.nn import parallelize
from colossalai.nn.exact import exact_mode
from colossalai.testing import spawn
from tests.inference.models import WORDS, build

Bits = dict[object, tuple[list[int], list[float]]]


def requests(count: int) -> list[tuple[list[int], Sampling]]:
    numbers = random.Random(5)
    found = []
    for i in range(count):
        prompt = [numbers.randrange(2, WORDS) for _ in range(numbers.randrange(1, 24))]
        if i % 7 == 3:
            prompt = [7, 8, 9] * 5 + prompt[:2]  # pages are shared
        drawn = Sampling(
            max_tokens=5, seed=i, top_p=0.9, logprobs=0, prompt_logprobs=0 if i % 5 == 0 else None
        )
        found.append((prompt, drawn if i % 2 else Sampling(max_tokens=4, temperature=0.0, logprobs=0)))
    return found


def bits(completion: Completion) -> tuple[list[int], list[float]]:
    rows = [*(completion.prompt_logprobs or ()), *(completion.logprobs or ())]
    return completion.tokens, [t.logprob for t in rows]


def written(generator: Generator, asked: list[Any], seed: int) -> Bits:
    """What requests get that come in an order of ``seed``, some at once and some later."""
    numbers = random.Random(seed)
    order = list(range(len(asked)))
    numbers.shuffle(order)
    done = {}
    while order or not generator.idle:
        for _ in range(min(len(order), numbers.randrange(12))):
            uid = order.pop()
            generator.submit(*asked[uid], uid=uid)
            done[uid] = Completion(uid, asked[uid][0])
        for event in generator.step():
            done[event.uid].add(event)
    return {uid: bits(completion) for uid, completion in done.items()}


def write_on(rank: int, world_size: int, port: int, name: str, count: int, seeds: list[int]) -> list[Bits]:
    model = build(name)
    config: dict[str, object] = {"parallel": {"tensor": {"size": world_size, "mode": "1d"}}}
    colossalai.launch(config, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    model = parallelize(model)
    found = []
    for seed in seeds:
        generator = Generator(
            model,
            max_requests=16 + 5 * seed,
            page_size=4,
            pages=90,
            chunk=40,
            exact=True,
        )
        if rank == 0:
            found.append(written(generator, requests(count), seed))
            generator.close()
        else:
            generator.follow()
    texts = [prompt for prompt, _ in requests(6)]
    generator = Generator(model, page_size=4, pages=90, exact=True)
    served = generator.score(texts)
    with exact_mode():
        for text, row in zip(texts, served, strict=True):
            scores = model(torch.tensor([text, text[::-1]])).logits[0].float().log_softmax(-1)
            assert scores[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0].double().tolist() == row
    return found


@pytest.mark.parametrize(
    ("name", "tp", "count"),
    [
        ("llama", 2, 40),
        pytest.param("opt", 4, 500, marks=pytest.mark.slow),
        pytest.param("llama", 2, 500, marks=pytest.mark.slow),
    ],
)
def test_orders_of_arrival_change_no_bit_on_several_ranks(name: str, tp: int, count: int) -> None:
    first, *others = spawn(write_on, tp, name=name, count=count, seeds=[1, 2, 3])[0]
    assert len(first) == count
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("opt", 100),
        *(pytest.param(n, 500, marks=pytest.mark.slow) for n in ("opt", "llama", "gpt2", "bloom")),
    ],
)
def test_orders_of_arrival_change_no_bit(name: str, count: int) -> None:
    found = []
    for seed in (1, 2, 3):
        generator = Generator(
            build(name), max_requests=16 + 20 * seed, page_size=4, pages=300, chunk=64, exact=True
        )
        found.append(written(generator, requests(count), seed))
        generator.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "qwen3", "mistral", "mixtral", "titans"])
def test_served_log_probabilities_are_those_of_training(name: str) -> None:
    model = build(name)
    asked = [(p, s) for p, s in requests(24) if len(p) > 1]
    generator = Generator(model, max_requests=7, page_size=4, chunk=16, exact=True)
    sampling = Sampling(max_tokens=6, seed=2, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    completions = generator.generate([prompt for prompt, _ in asked], sampling)
    texts = [c.prompt_tokens + c.tokens for c in completions]
    longest = max(len(t) for t in texts)
    batch = torch.tensor([t + [1] * (longest - len(t)) for t in texts])
    with exact_mode():
        out = model(batch)
        scores = (out if isinstance(out, torch.Tensor) else out.logits).float().log_softmax(-1)
        scores.sum().backward()  # and it can be trained
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    own = scores[:, :-1].gather(-1, batch[:, 1:, None])[..., 0]
    for row, (completion, text) in enumerate(zip(completions, texts, strict=True)):
        assert bits(completion)[1] == own[row, : len(text) - 1].double().tolist()
