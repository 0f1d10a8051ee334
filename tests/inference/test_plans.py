"""Under every plan the same is written as by the whole model, greedily and by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.inference import Generator, Sampling
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from colossalai.pipeline.stage import Placement
from colossalai.testing import spawn
from tests.inference.models import NAMED, Letters, build, greedy, log_probabilities, prompts

COUNT = 12
GREEDY = Sampling(max_tokens=COUNT, temperature=0, logprobs=2, prompt_logprobs=1)
DRAWN = Sampling(max_tokens=COUNT, seed=3, top_p=0.95, top_k=60, min_p=0.001, repetition_penalty=1.2)
PLANS = [(tp, pp) for pp in (1, 2) for tp in (1, 2, 4) if tp * pp > 1]
CASES = [(name, tp, pp) for name in (*NAMED, "mixtral", "titans") for tp, pp in PLANS]
# each way of cutting, each of a different kind of attention
SAMPLE = [("bloom", 2, 2), ("llama", 4, 1), ("titans", 2, 1), ("opt", 1, 2)]
SAMPLE.append(("gpt2", 1, 4))
CASES = [*SAMPLE, *(case for case in CASES if case not in SAMPLE and case != ("titans", 1, 2))]
CASES = [case for case in CASES if case[0] != "titans" or case[2] == 1]


def launch(rank: int, world_size: int, port: int, tp: int, pp: int) -> None:
    parallel: dict[str, Any] = {"tensor": {"size": tp, "mode": "1d"}, "pipeline": pp}
    config = {"parallel": parallel}
    colossalai.launch(config, rank, world_size, "localhost", port, backend="gloo", verbose=False)


def cut(model: Any, pp: int) -> Any:
    return split_model(model, Placement(pp)) if pp > 1 else parallelize(model)


def _built(name: str, pp: int) -> Any:
    return build(name, n_layer=pp) if pp > 2 else build(name)


def write(rank: int, world_size: int, port: int, name: str, tp: int, pp: int) -> list[Any]:
    model = _built(name, pp)
    whole = model.state_dict()
    launch(rank, world_size, port, tp, pp)
    if name == "titans":
        from colossalai.mesh import placement, shard
        from colossalai.nn.modes import current

        model = build(name)
        for key, param in model.state_dict(keep_vars=True).items():
            param.data.copy_(shard(whole[key], placement(param), current().mesh, uneven=True))
    else:
        model = cut(model, pp)
    generator = Generator(model, page_size=4, chunk=9, pages=40)
    written = [generator.generate(prompts(), sampling) for sampling in (GREEDY, DRAWN)]
    return [*written, generator.score(prompts()), generator.stats()]


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [pytest.param(*c, marks=() if c in SAMPLE else pytest.mark.slow) for c in CASES]
)
def test_a_plan_writes_what_the_whole_model_writes(name: str, tp: int, pp: int) -> None:
    model = _built(name, pp)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts()]
    alone = Generator(model).generate(prompts(), DRAWN)
    for written, drawn, scores, stats in spawn(write, tp * pp, name=name, tp=tp, pp=pp):
        assert [c.tokens for c in written] == expected
        assert [c.tokens for c in drawn] == [c.tokens for c in alone]
        assert stats.pages_used == 0
        assert stats.prefix_hits > 0
        for prompt, completion, score in zip(prompts(), written, scores, strict=True):
            tokens = prompt + completion.tokens
            table = log_probabilities(model, tokens)
            wanted = table[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
            found = [t.logprob for t in (completion.prompt_logprobs or []) + completion.logprobs]
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)
            torch.testing.assert_close(torch.tensor(score), wanted[: len(prompt) - 1], rtol=0, atol=1e-4)
            for token, row in zip(completion.logprobs, table[len(prompt) - 1 :], strict=False):
                assert [t for t, _ in token.top] == row.topk(2).indices.tolist()


# ---- a team with a leader ----


def lead(rank: int, world_size: int, port: int, folder: Path) -> Any:
    launch(rank, world_size, port, 2, 1)
    generator = Generator(parallelize(build("llama")), page_size=4)
    if rank:
        generator.follow()
        return generator.stats()
    for i, prompt in enumerate(prompts()):
        generator.submit(prompt, Sampling(max_tokens=COUNT, temperature=0), uid=i)
    written: dict[Any, list[int]] = {i: [] for i in range(len(prompts()))}
    reasons = {}
    generator.step()
    generator.cancel(3)
    more = generator.generate([[5, 6]], Sampling(max_tokens=3, temperature=0))
    while not generator.idle:
        for event in generator.step():
            written[event.uid] += event.tokens
            reasons[event.uid] = event.finish_reason
    generator.close()
    return written, reasons, more, generator.stats()


def test_the_first_rank_leads_and_the_others_follow(tmp_path: Path) -> None:
    (written, reasons, more, stats), followed = spawn(lead, 2, folder=tmp_path)
    model = build("llama")
    assert stats == followed
    assert stats.pages_used == 0
    assert stats.finished == len(prompts()) + 1
    assert more[0].tokens == greedy(model, [5, 6], 3)
    for i, prompt in enumerate(prompts()):
        assert reasons[i] == ("cancelled" if i == 3 else "length")
        if i != 3:  # its first events came before they were kept
            assert greedy(model, prompt, COUNT)[1:] == written[i][-COUNT + 1 :]


def disagree(rank: int, world_size: int, port: int) -> list[str]:
    launch(rank, world_size, port, 2, 1)
    generator, words = Generator(parallelize(build("llama"))), []
    for call in (
        lambda: generator.generate([[5, 6 + rank]]),
        lambda: generator.generate([[]]),
        lambda: generator.generate([[5, WORDS_TOO_MANY]]),
    ):
        try:
            call()
        except ValueError as error:
            words.append(str(error))
    written = generator.generate([[5]], Sampling(max_tokens=2, temperature=0))
    return [*words, str(len(written[0].tokens))]


WORDS_TOO_MANY = 500


def test_a_bad_call_is_an_error_on_all_ranks_and_the_next_one_works() -> None:
    first, second = spawn(disagree, 2)
    assert first == second
    assert "were given different prompts" in first[0]
    assert "the prompt is empty" in first[1]
    assert "the prompt has the token 500, and this model knows 0 to 130" in first[2]
    assert first[3] == "2"


def new_weights(rank: int, world_size: int, port: int) -> Any:
    """The second stage alone is trained, without a trace in the first one."""
    launch(rank, world_size, port, 1, 2)
    model = cut(build("llama"), 2)
    generator = Generator(model, page_size=4)
    written = []
    for step in range(3):
        if step == 1 and rank == 1:
            torch.manual_seed(5)
            with torch.no_grad():
                for name, param in sorted(model.named_parameters()):
                    if "self_attn" in name:
                        param.add_(torch.randn_like(param), alpha=0.3)
        written.append([c.tokens for c in generator.generate(prompts(), GREEDY)])
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return written, params, generator.stats()


def test_pages_are_forgotten_if_one_stage_has_new_weights() -> None:
    (written, first, stats), (others, second, followed) = spawn(new_weights, 2)
    assert written == others
    assert stats == followed
    model = build("llama")
    assert written[0] == [greedy(model, prompt, COUNT) for prompt in prompts()]
    model.load_state_dict({**first, **second}, strict=False)
    assert written[1] == written[2] == [greedy(model, prompt, COUNT) for prompt in prompts()]
    assert written[1] != written[0]


def call_among_others(rank: int, world_size: int, port: int) -> Any:
    launch(rank, world_size, port, 2, 1)
    generator = Generator(parallelize(build("llama")), Letters(), page_size=4)
    if rank == 0:
        generator.submit([9, 9, 9], Sampling(max_tokens=30, temperature=0), uid="before")
    else:
        with pytest.raises(RuntimeError, match="submitted and cancelled on the first rank"):
            generator.cancel("before")
    (whole,) = generator.generate([[5, 6]], Sampling(max_tokens=8, temperature=0))
    stop = Sampling(max_tokens=8, temperature=0, stop=(whole.text[3:5],))
    stopped = generator.generate([[7, 8], [5, 6]], [Sampling(max_tokens=3, temperature=0), stop])
    stream = generator.stream([5, 6], GREEDY)
    if rank == 0:
        next(stream)
        with pytest.raises(ValueError, match="the next call begins when it has ended"):
            generator.generate([[7]], GREEDY)
        stream.close()
    assert list(stream) == []
    return [(c.tokens, c.text, c.finish_reason) for c in (whole, *stopped)]


def test_a_call_gets_its_own_requests_on_all_ranks() -> None:
    first, second = spawn(call_among_others, 2)
    assert first == second
    assert first[0][0] == greedy(build("llama"), [5, 6], 8)
    assert first[1][0] == greedy(build("llama"), [7, 8], 3)
    assert first[2][1:] == (first[0][1][:3], "stop")


# ---- replicas ----


def replicas(rank: int, world_size: int, port: int) -> Any:
    launch(rank, world_size, port, 1, 1)
    generator = Generator(build("gpt2"))
    mine = prompts()[: 2 + rank]
    return [c.tokens for c in generator.generate(mine, Sampling(max_tokens=4 + rank, temperature=0))]


def test_replicas_write_for_their_own_requests() -> None:
    model = build("gpt2")
    first, second = spawn(replicas, 2)
    assert first == [greedy(model, prompt, 4) for prompt in prompts()[:2]]
    assert second == [greedy(model, prompt, 5) for prompt in prompts()[:3]]


def capped(rank: int, world_size: int, port: int) -> str:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    launch(rank, world_size, port, 1, 3)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "vocab_size": 50,
    }
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    try:
        Generator(cut(model, 3))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_refusal_reaches_all_stages() -> None:
    for words in spawn(capped, 3):
        assert "caps its scores" in words or "another rank of this model cannot generate" in words


def experts_elsewhere(rank: int, world_size: int, port: int) -> Any:
    config = {"parallel": {"moe": {"size": 2}}}
    colossalai.launch(config, rank, world_size, "localhost", port, backend="gloo", verbose=False)
    generator = Generator(parallelize(build("mixtral")), page_size=4)
    return [c.tokens for c in generator.generate(prompts(), Sampling(max_tokens=6, temperature=0))]


def test_ranks_that_share_experts_write_together() -> None:
    expected = [greedy(build("mixtral"), prompt, 6) for prompt in prompts()]
    assert spawn(experts_elsewhere, 2) == [expected, expected]
