"""What is written greedily is what transformers writes, whatever the other requests and the pages are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.inference import Generator, Sampling
from colossalai.nn.attention import pages
from tests.inference.models import NAMED, build, greedy, prompts

COUNT = 20
GREEDY = Sampling(max_tokens=COUNT, temperature=0)
WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "parts of prompts": {"chunk": 5, "page_size": 4},
    "few pages": {"page_size": 4, "pages": 14, "max_length": 56},
    "few seats": {"max_requests": 2, "page_size": 8},
    "no reuse": {"prefix_reuse": False, "page_size": 1},
}


@pytest.mark.parametrize("name", [*NAMED, "mistral", "mixtral", "titans"])
def test_it_writes_what_transformers_writes(name: str) -> None:
    model = build(name)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts()]
    for way, options in WAYS.items():
        generator = Generator(model, **options)
        for _ in range(2):  # the second time the prompts lie in pages already
            found = generator.generate(prompts(), GREEDY)
            assert [c.tokens for c in found] == expected, way
        stats = generator.stats()
        assert stats.pages_used == stats.waiting == stats.running == 0
        assert (stats.preempted > 0) == (way == "few pages")
        assert (stats.prefix_hits > 0) == (way != "no reuse")
    alone = Generator(model, page_size=4)
    assert [alone.generate([prompt], GREEDY)[0].tokens for prompt in prompts()] == expected


def test_wrong_pages_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose tokens see others than their own is refused, and would be seen in what it writes."""
    attend = pages.paged_attention

    def one_key_less(*args: Any, **options: Any) -> torch.Tensor:
        query, keys, values, table, starts, lengths = args
        return attend(query, keys, values, table, starts, (lengths - 1).clamp(min=1), **options)

    monkeypatch.setattr(pages, "paged_attention", one_key_less)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot generate here: with its keys and values"):
        Generator(build("llama"))


class Mixes(nn.Module):
    """A model that also looks at the token before, outside of attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + hidden.roll(1, 1))


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp = Mixes(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match="its code mixes tokens outside of attention"):
        Generator(model)
