"""Requests as a script makes them: text, streams, stop strings, log-probabilities, cancelling, bad scores."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from colossalai.inference import Completion, Event, Generator, Sampling
from colossalai.nn import exact_mode
from tests.inference.models import (
    WORDS,
    Bytes,
    Letters,
    SpecialBytes,
    build,
    greedy,
    log_probabilities,
    prompts,
)

GREEDY = Sampling(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def drain(generator: Generator) -> dict[Any, Completion]:
    done: dict[Any, Completion] = {}
    while not generator.idle:
        for event in generator.step():
            done.setdefault(event.uid, Completion(event.uid, [])).add(event)
    return done


# ---- text ----


def test_text_in_and_text_out(model: Any) -> None:
    generator = Generator(model, Letters())
    tokens = Letters().encode("What is")
    (found,) = generator.generate(["What is"], GREEDY)
    assert found.prompt_tokens == tokens
    assert found.tokens == greedy(model, tokens, 12)
    assert found.text == Letters().decode(found.tokens)
    assert found.finish_reason == "length"


def test_a_stream_is_the_completion_in_pieces(model: Any) -> None:
    generator = Generator(model, Letters())
    (whole,) = generator.generate(["What is"], GREEDY)
    events = list(generator.stream("What is", GREEDY))
    assert [len(e.tokens) for e in events] == [1] * 12
    assert "".join(e.text for e in events) == whole.text
    assert [e.finish_reason for e in events] == [None] * 11 + ["length"]
    for _ in generator.stream("What is", GREEDY):
        break  # a reader that goes away
    assert generator.idle
    assert generator.stats().pages_used == 0


def test_a_stop_string_ends_a_text_and_is_left_out(model: Any) -> None:
    generator = Generator(model, Letters())
    (whole,) = generator.generate(["What is"], GREEDY)
    stop = whole.text[5:8]
    place = whole.text.index(stop)
    sampling = Sampling(max_tokens=12, temperature=0, stop=("never", stop))
    (found,) = generator.generate(["What is"], sampling)
    assert found.finish_reason == "stop"
    assert found.text == whole.text[:place]
    assert len(found.tokens) == place + 3
    events = list(generator.stream("What is", sampling))
    assert "".join(e.text for e in events) == whole.text[:place]
    assert generator.stats().pages_used == 0


def test_a_beginning_of_a_stop_string_is_held_back_until_it_is_none(model: Any) -> None:
    generator = Generator(model, Letters())
    (whole,) = generator.generate(["What is"], GREEDY)
    sampling = Sampling(max_tokens=12, temperature=0, stop=(whole.text[4:6] + "\0",))
    events = list(generator.stream("What is", sampling))
    assert "".join(e.text for e in events) == whole.text
    assert "" in [e.text for e in events]


def test_stop_tokens_and_the_last_token_of_the_model() -> None:
    model = build("llama")
    tokens = greedy(model, [5, 6], 12)
    stop = tokens[4]
    (found,) = Generator(model).generate(
        [[5, 6]], Sampling(max_tokens=12, temperature=0, stop_tokens=(stop,))
    )
    assert (found.tokens, found.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
    before = Generator(model)
    model.generation_config.eos_token_id = [stop, next(t for t in range(WORDS) if t not in tokens)]
    (found,) = before.generate([[5, 6]], GREEDY)
    assert found.tokens == tokens[: tokens.index(stop) + 1]
    for ignore, length in ((False, tokens.index(stop) + 1), (True, 12)):
        sampling = Sampling(max_tokens=12, temperature=0, ignore_eos=ignore)
        (found,) = Generator(model).generate([[5, 6]], sampling)
        assert found.tokens == tokens[:length]


def test_no_half_characters_are_given() -> None:
    from colossalai.inference.text import TextStream

    for text in ("für 5 €", "日本語"):
        stream = TextStream(Bytes(), Bytes().encode("x"), ())
        pieces = [stream.add([token]) for token in Bytes().encode(text)]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
    stream = TextStream(Bytes(), [], ())
    assert stream.add(Bytes().encode("€")[:2]) == ""
    assert stream.add([], last=True) == "\ufffd", "a text that ends within a character says so"


def test_tokens_without_text_are_not_decoded_again_with_each_that_follows() -> None:
    from colossalai.inference.text import TextStream

    for token, text in ((300, ""), (0xFF, "\ufffd"), (0xE2, "\ufffd"), (0x98, "\ufffd")):
        tokenizer = SpecialBytes()
        stream = TextStream(tokenizer, [97])
        found = "".join(stream.add([token]) for _ in range(500)) + stream.add([], last=True)
        assert found == 500 * text
        assert tokenizer.longest < 64


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_bytes_are_the_whole_text(seed: int) -> None:
    """Characters of several tokens, bytes that are none, and tokens without text, also inside of them."""
    from colossalai.inference.text import TextStream

    draw, tokens = random.Random(seed), list[int]()
    while len(tokens) < 300:
        tokens += draw.choice(
            [
                [*"".join(draw.choices("ab é€😀漢\ufffd", k=8)).encode()],
                draw.choices(range(256), k=draw.randrange(40)),
                draw.choices([0xE2, 0x82, 0xF0, 0x9F, 0x98], k=draw.randrange(40)),
                [300] * draw.randrange(40),
            ]
        )
    tokenizer, found, at = SpecialBytes(), "", 0
    stream = TextStream(tokenizer, [97])
    while at < len(tokens):
        count = draw.choice([1, 1, 1, 2, 5])
        found, at = found + stream.add(tokens[at : at + count]), at + count
    assert found + stream.add([], last=True) == tokenizer.decode(tokens)


# ---- chance ----


def test_seeds_repeat_whatever_else_is_written(model: Any) -> None:
    state = torch.get_rng_state()
    drawn = Sampling(max_tokens=12, seed=7)
    alone = [Generator(model).generate([p], drawn)[0].tokens for p in prompts()]
    together = Generator(model, page_size=4, pages=12, max_length=44).generate(prompts(), drawn)
    assert [c.tokens for c in together] == alone
    other = Generator(model).generate(prompts(), Sampling(max_tokens=12, seed=8))
    assert [c.tokens for c in other] != alone
    free = Generator(model).generate([[5]] * 8, Sampling(max_tokens=12))
    assert len({tuple(c.tokens) for c in free}) == 8, "without a seed each request draws its own"
    assert torch.equal(state, torch.get_rng_state())


# ---- log-probabilities ----


def test_log_probabilities_are_those_of_the_model(model: Any) -> None:
    generator = Generator(model, chunk=7, page_size=4)
    sampling = Sampling(max_tokens=6, temperature=0.5, top_k=3, seed=1, logprobs=3, prompt_logprobs=2)
    plain = generator.generate(prompts(), Sampling(max_tokens=6, temperature=0.5, top_k=3, seed=1))
    for prompt, found, same in zip(prompts(), generator.generate(prompts(), sampling), plain, strict=True):
        assert found.tokens == same.tokens
        assert same.logprobs is same.prompt_logprobs is None
        table = log_probabilities(model, prompt + found.tokens)
        rows = [*(found.prompt_logprobs or []), *(found.logprobs or [])]
        assert [row.token for row in rows] == (prompt + found.tokens)[1:]
        for place, row in enumerate(rows):
            expected = table[place]
            assert row.logprob == pytest.approx(float(expected[row.token]), abs=1e-4)
            top = expected.topk(2 if place < len(prompt) - 1 else 3)
            assert [t for t, _ in row.top] == top.indices.tolist()
            assert [p for _, p in row.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_scores_of_texts(model: Any) -> None:
    texts = prompts()
    for _ in range(2):
        for text, found in zip(texts, Generator(model, chunk=11).score(texts), strict=True):
            table = log_probabilities(model, text)
            expected = [float(table[i, token]) for i, token in enumerate(text[1:])]
            assert found == pytest.approx(expected, abs=1e-4)


def test_a_long_prompt_is_scored_in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossalai.inference.scheduler.MOST_SCORED", 3)
    texts = prompts()
    expected = Generator(model).score(texts)
    found = Generator(model, chunk=64).score(texts)
    assert [len(x) for x in found] == [len(t) - 1 for t in texts]
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


# ---- coming and going ----


def test_requests_come_and_go_while_others_are_written(model: Any) -> None:
    generator = Generator(model, max_requests=3, page_size=4)
    waiting = {f"r{i}": p for i, p in enumerate(prompts())}
    events: list[Event] = []
    for uid, prompt in waiting.items():
        assert generator.submit(prompt, GREEDY, uid=uid) == uid
        events += generator.step()
    assert generator.stats().waiting + generator.stats().running == len(waiting)
    with pytest.raises(ValueError, match="'r5' is on its way already"):
        generator.submit([5], uid="r5")
    generator.cancel("r5")
    generator.cancel("r5")
    generator.cancel("nobody")
    more = generator.generate([[9, 9]], GREEDY)
    done = {event.uid: Completion(event.uid, []) for event in events}
    for event in events:
        done[event.uid].add(event)
    for uid, rest in drain(generator).items():
        done.setdefault(uid, Completion(uid, [])).tokens += rest.tokens
        done[uid].finish_reason = rest.finish_reason
    assert more[0].tokens == greedy(model, [9, 9], 12)
    for uid, prompt in waiting.items():
        expected = greedy(model, prompt, 12)
        assert done[uid].finish_reason == ("cancelled" if uid == "r5" else "length")
        assert done[uid].tokens == expected[: len(done[uid].tokens)]
        assert len(done[uid].tokens) == 12 or uid == "r5"
    assert generator.stats().pages_used == 0
    assert generator.idle
    generator.submit([5], uid="r5")  # a name may be used again


def test_scores_that_are_no_numbers_end_one_request_alone() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
    generator = Generator(model, page_size=4)
    good = [p for p in prompts() if 77 not in p]
    found = generator.generate([*good, [5, 77, 6], [77]], GREEDY)
    for prompt, completion in zip(good, found, strict=False):
        assert completion.tokens == greedy(model, prompt, 12)
    for completion in found[len(good) :]:
        assert completion.finish_reason == "error"
        assert completion.tokens == []
        assert "scores that are no finite numbers (nan or infinite) at position" in str(completion.error)
    assert generator.stats().pages_used == 0
    with pytest.raises(ValueError, match="sequence 1: the model gave scores"):
        generator.score([[5, 6], [5, 77, 6]])


def test_an_error_between_tokens_leaves_a_log_probability_for_each_token() -> None:
    model = build("llama")
    first, second, *_ = greedy(model, [5, 6], 2)
    with torch.no_grad():
        model.model.embed_tokens.weight[second] = float("nan")
    (found,) = Generator(model).generate([[5, 6]], Sampling(max_tokens=9, temperature=0, logprobs=0))
    assert (found.finish_reason, found.tokens) == ("error", [first, second])
    assert [one.token for one in found.logprobs or ()] == [first, second]


def test_a_closed_generator_says_so(model: Any) -> None:
    generator = Generator(model)
    generator.close()
    generator.close()
    with pytest.raises(RuntimeError, match="closed"):
        generator.generate([[5]])


@pytest.mark.parametrize("count", [120, pytest.param(1200, marks=pytest.mark.slow)])
def test_whoever_comes_and_goes_a_request_gets_what_it_gets_alone(model: Any, count: int) -> None:
    numbers = random.Random(1)
    texts = [[numbers.randrange(2, 6) for _ in range(numbers.randrange(1, 30))] for _ in range(20)]
    asked = [
        Sampling(
            max_tokens=numbers.randrange(1, 20),
            temperature=i % 2,
            seed=i,
            logprobs=1 if i % 3 else None,
            prompt_logprobs=None if i % 5 else 0,
        )
        for i in range(20)
    ]
    alone = [Generator(model).generate([text], own)[0] for text, own in zip(texts, asked, strict=True)]
    generator = Generator(model, page_size=4, pages=30, chunk=16, max_requests=6, max_length=60)
    written: dict[int, Completion] = {}
    while len(written) < count or not generator.idle:
        for _ in range(min(numbers.randrange(3), count - len(written))):
            uid = len(written)
            generator.submit(texts[uid % 20], asked[uid % 20], uid=uid)
            written[uid] = Completion(uid, texts[uid % 20])
        if numbers.random() < 0.15:
            generator.cancel(numbers.randrange(len(written) + 1))
        for event in generator.step():
            written[event.uid].add(event)
    for uid, found in written.items():
        expected = alone[uid % 20]
        if found.finish_reason == "cancelled":
            assert found.tokens == expected.tokens[: len(found.tokens)]
            continue
        assert (found.tokens, found.finish_reason) == (expected.tokens, expected.finish_reason)
        for name in ("logprobs", "prompt_logprobs"):
            own, other = getattr(found, name) or [], getattr(expected, name) or []
            assert [t.token for t in own] == [t.token for t in other]
            assert [t.logprob for t in own] == pytest.approx([t.logprob for t in other], abs=1e-4)
    stats = generator.stats()
    assert stats.finished == count
    assert stats.pages_used == 0
    assert stats.preempted > 0


# ---- the model stays as it is ----


def test_the_model_is_as_before_between_steps() -> None:
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    before = {n: (p.requires_grad, p.clone()) for n, p in model.named_parameters()}
    chosen = model.config._attn_implementation
    generator = Generator(model)
    generator.submit([5, 6], GREEDY)
    generator.step()
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == chosen
    assert not any("pages" in m.__dict__ for m in model.modules())
    for name, param in model.named_parameters():
        assert param.requires_grad == before[name][0]
        assert torch.equal(param, before[name][1])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert greedy(copied.eval(), [5, 6], 3) == greedy(copied, [5, 6], 3)
    drain(generator)


@pytest.mark.parametrize("training", [False, True])
def test_new_weights_are_used_at_once(training: bool) -> None:
    """Keys and values of other weights are of no use, though the prompt is the same."""
    model = build("opt").train(training)
    generator = Generator(model, page_size=4)
    first = generator.generate(prompts(), GREEDY)
    generator.submit(prompts()[3], Sampling(max_tokens=20, temperature=0), uid="running")
    written = [token for _ in range(4) for event in generator.step() for token in event.tokens]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.2)
    model.eval()
    on = greedy(model, prompts()[3] + written, 16)
    model.train(training)
    assert drain(generator)["running"].tokens == on
    second = generator.generate(prompts(), GREEDY)
    model.eval()
    assert [c.tokens for c in second] == [greedy(model, p, 12) for p in prompts()]
    assert [c.tokens for c in first] != [c.tokens for c in second]


def test_weights_written_without_a_trace_are_used_at_once() -> None:
    """Averages of weights, and older optimizers, write to ``param.data``, which torch does not count."""
    model = build("opt")
    generator = Generator(model, page_size=4)
    first = generator.generate(prompts(), GREEDY)
    torch.manual_seed(0)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param), alpha=0.2)
    second = generator.generate(prompts(), GREEDY)
    assert [c.tokens for c in second] == [greedy(model, p, 12) for p in prompts()]
    assert [c.tokens for c in first] != [c.tokens for c in second]
    assert generator.stats().prefix_hits == (before := generator.stats().prefix_hits)
    generator.generate(prompts(), GREEDY)
    assert generator.stats().prefix_hits > before  # weights that stay keep their pages


@pytest.mark.parametrize("pad", [1, 0], ids=["own token", "last token"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["list", "tensor", "array"])
def test_padding_is_never_read_as_text(kind: str, side: str, pad: int) -> None:
    model = build("llama")
    model.generation_config.pad_token_id = model.config.pad_token_id = pad
    generator, texts = Generator(model), [[5, 6, 7, 8], [9], [10, 11]]
    rows = []
    for text in texts:
        fill = [pad] * (4 - len(text))
        rows.append(fill + text if side == "left" else text + fill)
    mask = [[int(token != pad) for token in row] for row in rows]
    as_kind: Any = {"list": list, "tensor": torch.tensor, "array": np.array}[kind]
    alone = [c.tokens for c in generator.generate(texts, GREEDY)]
    batch = {"input_ids": as_kind(rows), "attention_mask": as_kind(mask)}
    assert [c.tokens for c in generator.generate(batch, GREEDY)] == alone
    with pytest.raises(ValueError, match=f"padded with the token {pad}"):
        generator.generate(as_kind(rows), GREEDY)
    same = as_kind([[5, 6], [7, 0]])  # of one length, and one of them has ended
    assert not any(c.error for c in generator.generate(same, GREEDY))


def test_two_generators_share_a_model(model: Any) -> None:
    first, second = Generator(model), Generator(model, page_size=3)
    first.submit([5, 6], GREEDY, uid=0)
    second.submit([7, 8], GREEDY, uid=0)
    found: tuple[list[int], list[int]] = [], []
    for _ in range(12):
        for generator, tokens in zip((first, second), found, strict=True):
            tokens += [t for event in generator.step() for t in event.tokens]
    assert found == (greedy(model, [5, 6], 12), greedy(model, [7, 8], 12))


def test_a_text_ends_where_the_positions_end(model: Any) -> None:
    prompt = [t % WORDS for t in range(2, 62)]
    (found,) = Generator(model).generate([prompt], Sampling(max_tokens=50, temperature=0))
    assert len(found.tokens) == 4
    assert found.finish_reason == "length"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of transformers, by PEFT
def test_a_model_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build("llama"), options).eval()
    found = Generator(adapted).generate(prompts(), GREEDY)
    merged = copy.deepcopy(adapted).merge_and_unload()
    assert [c.tokens for c in found] == [greedy(merged, prompt, 12) for prompt in prompts()]
    plain = [greedy(build("llama"), prompt, 12) for prompt in prompts()]
    assert [c.tokens for c in found] != plain
    switched = Generator(adapted, page_size=4)  # as reinforcement learning gets the scores of a reference
    for _ in range(2):
        assert [c.tokens for c in switched.generate(prompts(), GREEDY)] == [c.tokens for c in found]
        with adapted.disable_adapter():
            assert [c.tokens for c in switched.generate(prompts(), GREEDY)] == plain
    adapted.add_adapter("other", options)
    for name, param in adapted.named_parameters():  # without a trace
        param.data += torch.randn_like(param) * ("lora_B.other" in name)
    adapted.set_adapter("other")
    other = [c.tokens for c in switched.generate(prompts(), GREEDY)]
    assert other == [c.tokens for c in Generator(adapted).generate(prompts(), GREEDY)]
    assert other != [c.tokens for c in found]


# ---- calls inside of calls ----


def test_streams_that_are_read_in_turns_lose_nothing(model: Any) -> None:
    generator = Generator(model)
    texts = [[5, 6], [7, 8], [9]]
    found: list[list[int]] = [[], [], []]
    streams = [
        generator.stream(text, Sampling(max_tokens=4 + 4 * i, temperature=0)) for i, text in enumerate(texts)
    ]
    left = dict(enumerate(streams))
    while left:
        for i, stream in list(left.items()):
            event = next(stream, None)
            if event is None:
                del left[i]
            else:
                found[i] += event.tokens
    assert found == [greedy(model, text, 4 + 4 * i) for i, text in enumerate(texts)]
    assert generator.idle


def test_calls_and_steps_inside_of_a_stream(model: Any) -> None:
    generator = Generator(model, max_requests=2)
    generator.submit([3, 4], GREEDY, uid="beside")
    written: list[int] = []
    beside: list[int] = []
    for event in generator.stream([5, 6], GREEDY):
        written += event.tokens
        assert generator.generate([[9]], Sampling(max_tokens=2, temperature=0))[0].tokens == greedy(
            model, [9], 2
        )
        for other in generator.step():
            assert other.uid == "beside"
            beside += other.tokens
    assert written == greedy(model, [5, 6], 12)
    assert beside == greedy(model, [3, 4], 12)
    open_stream = generator.stream([5, 6], GREEDY)
    next(open_stream)
    assert drain(generator) == {}, "the events of a stream wait for who reads it"
    assert [t for event in open_stream for t in event.tokens] == greedy(model, [5, 6], 12)[1:]
    assert generator.stats().pages_used == 0
    left = generator.stream([5, 6], GREEDY)
    next(left)
    generator.close()
    left.close()


def test_a_request_that_arrives_during_a_step_can_be_cancelled(model: Any) -> None:
    """From another thread, after arrivals were read and before cancels are."""
    generator = Generator(model)

    class Late(type(generator._arriving)):  # type: ignore[misc]
        def __bool__(self) -> bool:
            if not len(self) and not seen:
                seen.append(1)
                generator.submit([5, 6], GREEDY, uid="late")
                late = self.popleft()
                generator.cancel("late")
                waits.append(late)
            return len(self) > 0

    seen: list[int] = []
    waits: list[Any] = []
    generator._arriving = Late()
    generator.step()
    generator._arriving += waits
    (event,) = generator.step()
    assert (event.uid, event.finish_reason) == ("late", "cancelled")


# ---- what goes wrong in the middle ----


def test_a_step_that_was_broken_off_leaves_no_wrong_pages(model: Any) -> None:
    """Pages are planned before they are filled: those of a step that failed were never written."""
    generator = Generator(model, page_size=4)
    head = model.get_output_embeddings()
    for _ in range(2):

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generator.generate(prompts(), GREEDY)
        hook.remove()
        assert not head._forward_pre_hooks
        assert [c.tokens for c in generator.generate(prompts(), GREEDY)] == [
            greedy(model, prompt, 12) for prompt in prompts()
        ]
        assert generator.idle
        assert generator.stats().pages_used == 0


def test_hooks_and_modules_of_now_are_used() -> None:
    model = build("llama")
    generator = Generator(model, page_size=4)
    first = [c.tokens for c in generator.generate(prompts(), GREEDY)]
    torch.manual_seed(0)
    push = torch.randn(32)
    hook = model.model.layers[0].register_forward_hook(lambda _, __, out: out + push)
    pushed = [c.tokens for c in generator.generate(prompts(), GREEDY)]
    assert pushed == [greedy(model, prompt, 12) for prompt in prompts()] != first
    hook.remove()
    assert [c.tokens for c in generator.generate(prompts(), GREEDY)] == first
    model.model.layers[1].mlp = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.5))
    model.train()
    found = [c.tokens for c in generator.generate(prompts(), GREEDY)]
    assert model.model.layers[1].mlp[1].training
    assert found == [greedy(model.eval(), prompt, 12) for prompt in prompts()]


def test_a_head_of_now_is_used() -> None:
    model = build("llama")
    generator = Generator(model, page_size=4)
    generator.generate(prompts(), GREEDY)
    torch.manual_seed(5)
    model.resize_token_embeddings(150, mean_resizing=False)
    found = [completion.tokens for completion in generator.generate([*prompts(), [149]], GREEDY)]
    assert found == [greedy(model, prompt, 12) for prompt in (*prompts(), [149])]


def test_threads_that_generate_at_once_take_turns(model: Any) -> None:
    generator = Generator(model, page_size=4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: generator.generate([prompt, [5]], GREEDY), prompts()))
    expected = [[greedy(model, prompt, 12), greedy(model, [5], 12)] for prompt in prompts()]
    assert [[completion.tokens for completion in pair] for pair in found] == expected
    assert generator.stats().pages_used == 0


def test_the_precision_is_that_in_which_it_was_made(model: Any) -> None:
    sampling = Sampling(max_tokens=6, temperature=0, logprobs=0)
    generator = Generator(model)
    plain = generator.generate(prompts(), sampling)
    with torch.autocast("cpu", torch.bfloat16):
        for found, same in zip(generator.generate(prompts(), sampling), plain, strict=True):
            assert found.tokens == same.tokens
            one, other = ([t.logprob for t in c.logprobs or ()] for c in (found, same))
            assert one == pytest.approx(other, abs=1e-4)
        low = Generator(model, exact=True)
    (served,) = low.generate([[5, 6, 7]], sampling)
    with exact_mode(), torch.autocast("cpu", torch.bfloat16):
        scores = model(torch.tensor([[5, 6, 7, *served.tokens]])).logits
    assert scores.dtype == torch.bfloat16
    with exact_mode():
        rows = scores[0, 2:].float().log_softmax(-1)
    assert [t.logprob for t in served.logprobs or ()] == [
        rows[i, token].item() for i, token in enumerate(served.tokens)
    ]
