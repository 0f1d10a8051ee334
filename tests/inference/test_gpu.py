"""Generation on a GPU: what transformers writes there, by steps and by recorded graphs, whole and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import colossalai
from colossalai.inference import Generator, Sampling, load_model
from colossalai.testing import spawn
from colossalai.utils import get_current_device
from tests.inference.models import NAMED, build, greedy, prompts

COUNT = 20
GREEDY = Sampling(max_tokens=COUNT, temperature=0)
WAYS: list[dict[str, Any]] = [
    {},
    {"chunk": 5, "page_size": 4},
    {"page_size": 4, "pages": 14, "max_length": 56},
    {"exact": True},
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMED, "mistral", "mixtral", "titans"])
def test_a_gpu_writes_what_the_model_writes(name: str) -> None:
    model = build(name)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts()]
    drawn = Generator(model).generate(prompts(), Sampling(max_tokens=COUNT, seed=3, top_p=0.9))
    there = model.cuda()
    for options in WAYS:
        generator = Generator(there, **options)
        for _ in range(2):
            assert [c.tokens for c in generator.generate(prompts(), GREEDY)] == expected, options
        assert generator.stats().pages_used == 0
        generator.close()
    found = Generator(there).generate(prompts(), Sampling(max_tokens=COUNT, seed=3, top_p=0.9))
    assert [c.tokens for c in found] == [c.tokens for c in drawn], "a seed draws the same on every device"


def write(rank: int, world_size: int, port: int, path: Path) -> Any:
    parallel = {"tensor": {"size": 2, "mode": "1d"}, "pipeline": world_size // 2}
    colossalai.launch(
        {"parallel": parallel}, rank, world_size, "localhost", port, backend="gloo", verbose=False
    )
    model = load_model(path)
    assert all(p.device == get_current_device() for p in model.parameters())
    return [c.tokens for c in Generator(model, page_size=4).generate(prompts(), GREEDY)]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_write_what_the_model_writes(ranks: int, tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts()]
    assert all(found == expected for found in spawn(write, ranks, path=tmp_path))
