"""What cannot be served is one clear error, and the others go on."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTJConfig,
    GPTJForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaModel,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from colossalai.inference import Generator, Sampling
from tests.inference.models import Letters, build, greedy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": -1}, "max_tokens must be a whole number of 0 or more"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or more"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": None}, "temperature must be a finite number"),
        ({"top_k": -1}, "top_k must be a whole number of 0 or more"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"min_p": 2.0}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be 0.001 to 1000"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be 0.001 to 1000"),
        ({"seed": -1}, "seed must be a whole number of 0 or more"),
        ({"seed": 2**63}, "seed must be below 2**63"),
        ({"max_tokens": 10**30}, "max_tokens must be below 2**63"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"stop": "end"}, "write ('end',)"),
        ({"stop": ("",)}, "stop must be made of strings that are not empty"),
        ({"stop_tokens": (-1,)}, "stop_tokens must be made of numbers of tokens"),
        ({"logprobs": -1}, "logprobs must be a whole number"),
        ({"stop_tokens": 5}, "Sampling(stop_tokens=5): stop_tokens must be a tuple"),
    ],
)
def test_sampling(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Sampling(**options)


def test_sampling_with_the_names_of_other_libraries() -> None:
    with pytest.raises(
        TypeError, match="Sampling has no max_new_tokens, do_sample: for max_new_tokens give max"
    ):
        Sampling(max_new_tokens=5, do_sample=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokns'"):
        Sampling(max_tokns=5)  # type: ignore[call-arg]
    sampling = Sampling(max_tokens=5, stop=["a"])
    assert pickle.loads(pickle.dumps(sampling)) == sampling == dataclasses.replace(sampling, max_tokens=5)


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (
            "generate",
            {"max_new_tokens": 5, "do_sample": False},
            "has no max_new_tokens, do_sample: for max_new",
        ),
        (
            "generate",
            {"temperature": 0},
            r"for temperature give temperature\. How .* sampling=Sampling\(\.\.\.\)",
        ),
        (
            "generate",
            {"input_ids": [[5]], "attention_mask": [[1]]},
            "give the prompts as the first argument; for",
        ),
        ("stream", {"streamer": print}, "for streamer call stream"),
        ("submit", {"sampling_params": 1}, r"give sampling=Sampling"),
        ("score", {"input_ids": [[5]]}, "score has no input_ids"),
        ("score", {"logprob": 5}, "unexpected keyword argument 'logprob'"),
    ],
)
def test_calls_with_the_names_of_other_libraries(
    generator: Generator, call: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        getattr(generator, call)(**options)


def test_what_is_no_model_on_one_device() -> None:
    with pytest.raises(
        TypeError, match=r"takes a model, got str 'facebook/opt-125m'; colossalai\.inference\.load_"
    ):
        Generator("facebook/opt-125m")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"DataParallel: give its \.module"):
        Generator(torch.nn.DataParallel(build("llama")))
    with pytest.raises(ValueError, match="Sequential has no weights"):
        Generator(torch.nn.Sequential())
    model = build("llama")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"lm_head\.weight has no memory yet"):
        Generator(model)
    model = build("llama")
    with FakeTensorMode():
        model.lm_head.weight = torch.nn.Parameter(torch.empty(131, 32, device="cuda"))
    with pytest.raises(ValueError, match=r"has weights on cpu, cuda:0 \(a device_map of accelerate\?\)"):
        Generator(model)


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(build("llama"), max_requests=2, pages=3, page_size=8)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([5, 131], {}, "the prompt has the token 131, and this model knows 0 to 130"),
        ([5, -1], {}, "the prompt has the token -1"),
        ([5, 1.0], {}, "a list of whole numbers"),
        (b"56", {}, "a list of whole numbers, got b'56'"),
        ({"input_ids": [[5]]}, {}, "got a mapping; give its input_ids"),
        (
            [5] * 64,
            {},
            "the prompt has 64 tokens, and the model sees 64 with what it writes; give at most 63",
        ),
        ([5] * 20, {"max_tokens": 5}, "need pages for 25 tokens, and there are pages for 24"),
        ([5], {"stop_tokens": (131,)}, "stop_tokens has 131"),
        ([5], {"stop": ("x",)}, "has no tokenizer"),
        ([5], {"logprobs": 132}, "logprobs=132: this model knows 131 tokens"),
        ("text", {}, "has no tokenizer"),
    ],
)
def test_a_bad_request_is_refused_and_others_go_on(
    generator: Generator, prompt: Any, options: dict[str, Any], words: str
) -> None:
    generator.submit([5, 6], Sampling(max_tokens=3), uid="good")
    with pytest.raises(ValueError, match=re.escape(words)):
        generator.submit(prompt, Sampling(**options))
    while not generator.idle:
        events = generator.step()
    assert events[-1].uid == "good"
    assert events[-1].finish_reason == "length"


def test_an_empty_text_is_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        Generator(build("llama"), Letters()).submit("")


@pytest.mark.parametrize("call", ["generate", "score"])
def test_one_prompt_is_not_a_list_of_prompts(generator: Generator, call: str) -> None:
    for prompt in ("text", b"text", [5, 6], torch.tensor([5, 6]), {"input_ids": [5, 6]}, None):
        with pytest.raises(ValueError, match=r"write \[prompt\] for one"):
            getattr(generator, call)(prompt)
    with pytest.raises(ValueError, match="2 prompts and 1 samplings"):
        generator.generate([[5], [6]], [Sampling()])
    with pytest.raises(TypeError, match="sampling is a Sampling"):
        generator.generate([[5], [6]], {"max_tokens": 3})  # type: ignore[arg-type]
    rows = [np.array([5, 6]), [np.int64(5), np.int64(6)]]
    first, second = generator.generate(rows, Sampling(max_tokens=3, temperature=0))  # type: ignore[arg-type]
    assert first.tokens == second.tokens
    with pytest.raises(ValueError, match="a mapping of prompts has input_ids"):
        generator.generate({"ids": [[5]]})
    with pytest.raises(ValueError, match="attention_mask has another shape"):
        generator.generate({"input_ids": [[5, 6]], "attention_mask": [[1]]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_requests": 0}, "max_requests=0"),
        ({"page_size": 1.5}, "page_size=1.5"),
        ({"chunk": 0}, "chunk=0"),
        ({"max_length": 1}, "max_length=1"),
        ({"pages": 0}, "pages=0"),
        ({"memory": 2}, "memory=2"),
        ({"max_length": 65}, r"max_length=65\): the model has 64 positions"),
        ({"memory": 1e-12}, "0 pages of 16 tokens have no room for a request"),
        ({"pages": 1, "page_size": 1}, "1 pages of 1 tokens have no room for a request"),
    ],
)
def test_sizes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Generator(build("llama"), **options)


def _gemma() -> Any:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "vocab_size": 50,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads))


def _chunks() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50}
    experts = {"num_local_experts": 2, "attention_chunk_size": 4, "pad_token_id": 0}
    return Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads, **experts))


def _encoder_decoder() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1))


def _own_attention() -> Any:
    return GPTJForCausalLM(
        GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=50, n_positions=16)
    )


def _quantized() -> Any:
    model = build("llama")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def _linear() -> Any:
    model = build("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    return model


def _rotations() -> Any:
    model = build("llama")
    model.config.rope_parameters = {"rope_type": "dynamic"}
    return model


def _rotations_of_layers() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50}
    far = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rotations = {
        "full_attention": far | {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, rope_parameters=rotations))


def _counted_queries() -> Any:
    model = _chunks()
    model.config.no_rope_layers = [1, 0]  # it scales queries from `floor_scale` tokens on
    return model


def _counted_positions() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 50}
    config = RobertaConfig(num_attention_heads=2, is_decoder=True, **sizes)
    return RobertaForCausalLM(config)  # whose first position is 2


def _diverged() -> Any:
    model = build("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    return model


def _empty() -> Any:
    with torch.device("meta"):
        return build("llama")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_gemma, r"caps its scores \(softcap\)"),
        (_chunks, "see their own part of a text alone"),
        (_encoder_decoder, "has an encoder and a decoder"),
        (_own_attention, "does not go through transformers' AttentionInterface: its own code stopped"),
        (_quantized, "has quantized weights"),
        (_linear, "have linear attention"),
        (_rotations, r"its rotations \('dynamic'\) depend on the longest sequence"),
        (lambda: LlamaModel(build("llama").config), "has no head that scores words"),
        (_empty, "has no memory yet"),
        (_rotations_of_layers, r"its rotations \('longrope'\) depend on the longest sequence"),
        (_counted_queries, "scales its queries by the number of tokens before them in a step"),
        (_counted_positions, "counts positions in a way of its own"),
        (_diverged, "no finite numbers .* also with its own attention"),
        (lambda: torch.nn.Linear(3, 3), "has no head that scores words"),
    ],
    ids=lambda x: getattr(x, "__name__", "words").strip("_"),
)
def test_models(model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Generator(model())


@pytest.mark.parametrize("options", [{"pages": 1}, {"pages": 2, "page_size": 1}, {"max_length": 2}])
def test_few_pages_serve_what_fits(options: dict[str, Any]) -> None:
    (found,) = Generator(build("llama"), **options).generate([[5]], Sampling(max_tokens=1, temperature=0))
    assert found.tokens == greedy(build("llama"), [5], 1)
