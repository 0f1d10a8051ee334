"""``Generator`` beside ``transformers.generate``: ``python -m benchmarks.generation [part ...]`` on a GPU.

The model has the shape of OPT-6.7B and random weights in bfloat16, made on the GPU.  Parts:

- ``speed``: 128 tokens after prompts of 128, for 1 and 128 requests, beside ``generate``; and with
  ``exact=True``;
- ``mixed``: 1,024 requests of 32 to 1,024 tokens;
- ``profile``: what a step of 1 and of 128 requests consists of;
- ``smoke``: every way once, with four layers, against steps without graphs;
- ``exact``: 500 requests in three orders of arrival, and the forward pass of training, bit for bit.

Every figure is printed as soon as it is there, and a rate with its bar, so a run that a time limit ends has
said what it found.  ``mixed profile`` takes about 90 seconds on an H200, all parts about 8 minutes.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from benchmarks.table import Row, show
from colossalai.inference import Completion, Generator, Sampling
from colossalai.kernel import triton_early

BEGIN = time.perf_counter()
WORDS, PROMPT, WRITTEN = 50272, 128, 128
BARS = {1: (226, 275), 128: (10_300, 12_400)}
"""Of tokens per second by the number of requests on an H200: what is to be reached, and the aim."""


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", *words, flush=True)


def opt(layers: int = 32, width: int = 4096, words: int = WORDS, *, device: str = "cuda") -> Any:
    """OPT with random weights, drawn on the device: on a GPU in bfloat16."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=width,
        ffn_dim=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(4, width // 128),
        word_embed_proj_dim=width,
        vocab_size=words,
        max_position_embeddings=2048,
        dropout=0.0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return OPTForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def whole() -> Any:
    model = opt()
    say("the model is made")
    return model


def prompts(count: int, length: int = PROMPT, *, words: int = WORDS) -> list[list[int]]:
    return torch.randint(4, words, (count, length)).tolist()


def timed(work: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def generator(model: Any, count: int, **more: Any) -> Iterator[Generator]:
    made = Generator(model, max_requests=count, prefix_reuse=False, **{"max_length": 512, **more})
    try:
        yield made
    finally:
        made.close()
        del made
        torch.cuda.empty_cache()  # nothing without a GPU


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def rate_of_ours(model: Any, count: int, *, exact: bool = False) -> float:
    """Tokens per second, the better of two runs; what is compiled and recorded is so before."""
    words = model.config.vocab_size
    with generator(model, count, max_length=PROMPT + WRITTEN, exact=exact) as ours:
        ours.generate(prompts(count, words=words), greedy(4))
        asked = prompts(count, words=words)
        found: list[Completion] = []
        taken = min(timed(lambda: found.extend(ours.generate(asked, greedy(WRITTEN)))) for _ in range(2))
        assert [len(one.tokens) for one in found] == [WRITTEN] * count * 2
    return count * WRITTEN / taken


def rate_of_generate(model: Any, count: int) -> float:
    asked = torch.tensor(prompts(count, words=model.config.vocab_size), device=model.device)
    mask = torch.ones_like(asked)

    def write(tokens: int) -> None:
        out = model.generate(
            asked, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        assert out.shape[1] == PROMPT + tokens

    write(4)
    return count * WRITTEN / timed(lambda: write(WRITTEN))


def speed() -> list[Row]:
    model = whole()
    rows = []
    triton_early.wanted = False
    say(f"1 request, every kernel after the other: {rate_of_ours(model, 1):.0f} tokens/s")
    triton_early.wanted = True
    for count in (1, 128):
        ours = rate_of_ours(model, count)
        least, aim = BARS[count]
        verdict = "aim" if ours >= aim else "met" if ours >= least else "missed"
        say(f"{count} requests, Generator: {ours:.0f} tokens/s (bar {least}, aim {aim}: {verdict})")
        theirs = rate_of_generate(model, count)
        say(f"{count} requests, transformers.generate: {theirs:.0f} tokens/s")
        rows.append(
            Row(f"{count} requests of {PROMPT} + {WRITTEN}", ours, theirs, "transformers.generate", "tok/s")
        )
        exact = rate_of_ours(model, count, exact=True)
        say(f"{count} requests, exact: {exact:.0f} tokens/s, {exact / ours:.2f} of the normal speed")
        rows.append(Row(f"{count} requests, exact=True", exact, ours, "Generator", "tok/s"))
    return rows


def mixed(limit: float = 60) -> list[Row]:
    """For at most ``limit`` seconds."""
    model = whole()
    numbers = random.Random(0)
    asked = []
    for _ in range(1024):
        length = numbers.randrange(32, 1025)
        prompt = numbers.randrange(8, length - 7)
        asked.append((prompts(1, prompt)[0], greedy(length - prompt)))
    with generator(model, 192, max_length=1024) as ours:
        ours.generate(prompts(192, 8), greedy(40))
        before = ours.stats()
        for prompt, sampling in asked:
            ours.submit(prompt, sampling)
        most = taken_steps = 0
        begin = told = time.perf_counter()
        stop = begin + limit

        def write() -> None:
            nonlocal most, taken_steps, told
            while not ours.idle and (now := time.perf_counter()) < stop:
                ours.step()
                taken_steps += 1
                now_there = ours.stats()
                most = max(most, now_there.pages_used)
                if now - told > 10:
                    told, so_far = now, now_there.output_tokens - before.output_tokens
                    say(f"after {taken_steps} steps: {so_far / (now - begin):.0f} tokens/s; {now_there}")

        taken = timed(write)
        stats = ours.stats()
        read, written = (getattr(stats, n) - getattr(before, n) for n in ("prompt_tokens", "output_tokens"))
        say(
            f"{stats.finished - before.finished} of 1,024 mixed requests of 32 to 1,024 tokens ({read} read,"
            f" {written} written), 192 at a time: {taken:.1f} s, {written / taken:.0f} tokens/s written,"
            f" {taken_steps} steps, at most {most} of {stats.pages_used + stats.pages_free} pages,"
            f" {stats.preempted} preempted"
        )
    return []


def steps(generator: Generator, count: int) -> None:
    for _ in range(count):
        generator.step()


def profile() -> list[Row]:
    model = whole()
    for count in (1, 128):
        with generator(model, count) as ours:
            for prompt in prompts(count):
                ours.submit(prompt, greedy(200))
            for _ in range(40):
                ours.step()
            plain = timed(partial(steps, ours, 20)) / 20
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as seen:
                timed(partial(steps, ours, 20))
            rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
            busy = sum(r.self_device_time_total for r in rows) / 20 / 1e3
            say(f"a step of {count}: {plain * 1e3:.2f} ms, its kernels {busy:.2f} ms")
            for row in rows[:12]:
                each = row.self_device_time_total / 20
                print(f"    {each:8.0f} us {row.count // 20:5d} x {row.key[:90]}", flush=True)
    return []


def smoke() -> list[Row]:
    """Steps as graphs, ahead of the host, write what plain steps write."""
    model = opt(4)
    asked = [(p, Sampling(max_tokens=9 + i, seed=i, ignore_eos=True)) for i, p in enumerate(prompts(5, 40))]
    asked[0] = (asked[0][0], Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2))
    asked[1] = (asked[1][0], Sampling(max_tokens=30, top_k=9, top_p=0.8, min_p=0.01, seed=3, logprobs=0))
    for exact in (True, False):
        found = []
        for way in ("plain", "ahead", "graphs"):
            with generator(model, 8, exact=exact) as ours:
                if way != "graphs":
                    loop = ours.core._make_loop(exact, record=False)
                    ours.core._loop = loop if way == "ahead" else None
                found.append(ours.generate(*map(list, zip(*asked, strict=True))))
                found[-1] += ours.generate(
                    [asked[0][0]], Sampling(max_tokens=60, temperature=0.0, logprobs=0)
                )
        for name, other in (("plain", found[0]), ("unrecorded", found[1])):
            pairs = zip(other, found[2], strict=True)
            same = [a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in pairs]
            say(f"smoke: exact {exact}: requests with the bits of {name} steps in graphs: {same}")
            # without exact, steps of one row have kernels of their own, and the others another number of rows
            assert all(same) or not (exact or name == "unrecorded")
    say("smoke: ok")
    return []


def exact() -> list[Row]:
    """Of a model of four layers, so that time is left for many requests."""
    from colossalai.nn import exact_mode

    model = opt(4)
    numbers = random.Random(1)
    asked = [
        (
            prompts(1, numbers.randrange(1, 300))[0],
            Sampling(max_tokens=8, seed=i, logprobs=0, ignore_eos=True),
        )
        for i in range(500)
    ]
    found = []
    for seed in (1, 2, 3):
        done: dict[Any, Completion] = {}
        with generator(model, 40 + 60 * seed, exact=True, chunk=1024 * seed) as ours:
            order = list(range(len(asked)))
            random.Random(seed).shuffle(order)
            while order or not ours.idle:
                for _ in range(min(len(order), numbers.randrange(40))):
                    uid = order.pop()
                    ours.submit(*asked[uid], uid=uid)
                    done[uid] = Completion(uid, asked[uid][0])
                for event in ours.step():
                    done[event.uid].add(event)
        found.append({uid: (c.tokens, [t.logprob for t in c.logprobs or ()]) for uid, c in done.items()})
    same = [sum(found[0][uid] == other[uid] for uid in found[0]) for other in found[1:]]
    say(f"exact: of 500 requests in three orders of arrival, {same} have the bits of the first order")
    worst = 0.0
    for first in range(0, 64, 16):
        texts = [asked[uid][0] + found[0][uid][0] for uid in range(first, first + 16)]
        longest = max(map(len, texts))
        batch = torch.tensor([t + [1] * (longest - len(t)) for t in texts]).cuda()
        with exact_mode():
            scores = model(batch).logits.float().log_softmax(-1)
        own = scores[:, :-1].gather(-1, batch[:, 1:, None])[..., 0].double()
        for row, text in enumerate(texts):
            served = torch.tensor(found[0][first + row][1], dtype=torch.float64)
            trained = own[row, len(text) - 1 - len(served) : len(text) - 1].detach().cpu()
            worst = max(worst, (served - trained).abs().max().item())
    say(f"exact: largest |served - trained| log-probability of 64 requests: {worst}")
    return []


def last() -> list[Row]:
    """A few rates by themselves, after a look whether the product of one row is right."""
    from colossalai.kernel import triton_rows

    model = whole()
    attention = model.model.decoder.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    with torch.no_grad():
        x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
        found = triton_rows.one_row(x, [m.weight for m in layers], [m.bias for m in layers])
        off = max((f.float() - m(x).float()).abs().max().item() for f, m in zip(found, layers, strict=True))
    most = found[0].abs().max().item()
    say(f"the product of one row is off by {off:.1e}, of numbers up to {most:.1f}")
    say(f"1 request: {rate_of_ours(model, 1):.0f} tokens/s")
    say(f"128 requests, exact: {rate_of_ours(model, 128, exact=True):.0f} tokens/s")
    say(f"128 requests: {rate_of_ours(model, 128):.0f} tokens/s")
    return mixed(20)


PARTS = {part.__name__: part for part in (smoke, speed, profile, exact, mixed, last)}


def main() -> None:
    say(torch.__version__, torch.cuda.get_device_name())
    rows = []
    for name in sys.argv[1:] or [name for name in PARTS if name != "last"]:
        try:
            rows += PARTS[name]()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
    if rows:
        print(show(rows), flush=True)
    say("done")


if __name__ == "__main__":
    main()
