"""Steps that are started before the last one was read give what steps one after the other give."""

from __future__ import annotations

import random

import pytest

from colossalai.inference import Event, Generator, Sampling

transformers = pytest.importorskip("transformers")


def small_model() -> object:
    import torch

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def requests(count: int) -> list[tuple[list[int], Sampling]]:
    numbers = random.Random(4)
    found = []
    for i in range(count):
        prompt = [numbers.randrange(61) for _ in range(numbers.randrange(1, 30))]
        kind = i % 4
        asked = Sampling(
            max_tokens=numbers.randrange(1, 30),
            temperature=0.0 if kind == 0 else 1.0,
            top_k=5 if kind == 2 else 0,
            top_p=0.8 if kind == 2 else 1.0,
            seed=i,
            stop_tokens=(3, 7, 11) if i % 3 else (),
            repetition_penalty=1.2 if i % 11 == 7 else 1.0,
            logprobs=2 if i % 5 == 0 else None,
        )
        found.append((prompt, asked))
    return found


def run(generator: Generator, count: int, cancels: bool) -> dict[object, list[Event]]:
    """The events of requests that arrive while others write."""
    numbers, seen = random.Random(9), {}
    coming = requests(count)
    running: list[object] = []
    while coming or not generator.idle:
        if coming and numbers.random() < 0.3:
            prompt, asked = coming.pop(0)
            uid = generator.submit(prompt, asked, uid=count - len(coming))
            seen[uid] = []
            running.append(uid)
        if cancels and running and numbers.random() < 0.05:
            generator.cancel(numbers.choice(running))
        for event in generator.step():
            seen[event.uid].append(event)
    stats = generator.stats()
    assert stats.waiting == stats.running == 0
    return seen


@pytest.mark.parametrize("pages", [None, 16], ids=["room for all", "few pages"])
def test_steps_ahead_of_the_host_change_no_bit(pages: int | None) -> None:
    found = []
    for ahead in (False, True):
        generator = Generator(small_model(), max_requests=5, page_size=4, pages=pages, chunk=32, exact=True)
        if ahead:
            generator.core._loop = generator.core._make_loop(True, record=False)
        found.append(run(generator, 40, cancels=False))
        generator.close()
    plain, ahead_of_host = found
    assert plain.keys() == ahead_of_host.keys()
    for uid, events in plain.items():
        others = ahead_of_host[uid]
        for field in ("tokens", "logprobs"):
            one, other = ([x for e in r for x in getattr(e, field) or ()] for r in (events, others))
            assert one == other, (uid, field)
        assert events[-1].finish_reason == others[-1].finish_reason


def test_steps_are_really_ahead() -> None:
    generator = Generator(small_model(), max_requests=5, page_size=4)
    core = generator.core
    core._loop = loop = core._make_loop(False, record=False)
    loop.prepare()
    ahead: list[bool] = []
    real = loop.ahead
    loop.ahead = lambda flight: ahead.append((found := real(flight)) is not None) or found
    generator.generate([[1, 2, 3], [4, 5]], Sampling(max_tokens=20, temperature=0.0))
    assert sum(ahead) >= 15


def test_cancels_leave_no_pages() -> None:
    generator = Generator(small_model(), max_requests=5, page_size=4, pages=20, prefix_reuse=False)
    generator.core._loop = generator.core._make_loop(False, record=False)
    run(generator, 60, cancels=True)
    assert generator.stats().pages_used == 0
