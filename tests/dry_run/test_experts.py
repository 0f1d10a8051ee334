"""A dry run of experts plays even loads: memory of weights, states and activations, shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.dry_run import Parts, dry_run
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, Top2Router, TPExperts

WIDTH, INNER, EXPERTS = 16, 64, 8


class Model(nn.Module):
    def __init__(self, experts: type[FFNExperts] = FFNExperts) -> None:
        super().__init__()
        self.moe = MoeLayer(WIDTH, EXPERTS, Top2Router(), experts(EXPERTS, WIDTH, INNER))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(x))  # type: ignore[no-any-return]


def parts(samples: int, experts: type[FFNExperts] = FFNExperts) -> Parts:
    model = Model(experts)
    x, y = torch.zeros(samples, 32, WIDTH), torch.zeros(samples, 32, 4)
    return Parts(model, torch.optim.Adam(model.parameters()), MoeLoss(0.1, nn.MSELoss), (x, y))


@pytest.mark.parametrize("experts", [FFNExperts, TPExperts])
@pytest.mark.parametrize("plan", [{"moe": 2}, {"moe": 4}, {"moe": 2, "tensor": {"size": 2, "mode": "1d"}}])
def test_experts_are_shared_out(plan: dict[str, Any], experts: type[FFNExperts]) -> None:
    (alone,) = dry_run({}, 1, lambda: parts(8, experts))
    reports = dry_run({"parallel": plan}, 4, lambda: parts(8, experts))
    pieces = 4 if "tensor" in plan else plan["moe"]
    weights = EXPERTS * 2 * WIDTH * INNER  # of all experts
    for report in reports:
        assert report.parameters <= alone.parameters - weights * (1 - 1 / pieces)
        assert report.memory.states < 1.2 / pieces * alone.memory.states + 8 * EXPERTS * (WIDTH + INNER) * 4
        if experts is FFNExperts:  # as many rows come as go
            assert report.memory.activations < 1.2 * alone.memory.activations


def _mixtral(layers: int = 2, **options: Any) -> Parts:
    transformers = pytest.importorskip("transformers", reason="needs `pip install transformers`")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_local_experts=4,
        **{"num_key_value_heads": 2, **options},
    )
    model = colossalai.nn.parallelize(transformers.MixtralForCausalLM(config))
    ids = torch.zeros(4, 32, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())
    return Parts(model, optimizer, None, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_of_transformers(implementation: str) -> None:
    """Also where no rank has others: its own code would read choices, which have no values."""

    def build() -> Parts:
        return _mixtral(experts_implementation=implementation)

    (alone,) = dry_run({}, 1, build)
    (shared,) = dry_run({"parallel": {"moe": 2}}, 2, build)
    weights = 2 * 4 * 3 * 32 * 48  # of all experts
    assert shared.parameters == alone.parameters - weights // 2
    # as many rows come as go
    assert shared.memory.activations == alone.memory.activations
    (zero,) = dry_run({"zero": {"level": 2}}, 2, build)
    assert zero.memory.states < alone.memory.states
    (short,) = dry_run({}, 1, lambda: _mixtral(1, experts_implementation=implementation))
    assert short.memory.activations < 0.6 * alone.memory.activations


def test_grouped_keys_in_float32_keep_scores() -> None:
    """As on a GPU, where only flash attention has fewer keys than heads."""
    (grouped,) = dry_run({}, 1, _mixtral)
    (whole,) = dry_run({}, 1, lambda: _mixtral(num_key_value_heads=4))
    scores = 2 * 4 * 4 * 32 * 32 * 4  # layers, samples, heads, tokens
    assert grouped.memory.activations > whole.memory.activations + scores / 2
