"""What layers cost, counted and measured."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from colossalai.pipeline import PipelinableContext
from colossalai.pipeline.cost import estimate_costs, measure_costs
from titans.model.gpt import GPT


def test_operations_are_counted_without_memory() -> None:
    with PipelinableContext(large=1) as pipelinable:
        nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 4), nn.Flatten(), nn.Linear(20, 2))
    costs = estimate_costs(pipelinable.layers, torch.zeros(3, 5, dtype=torch.long))
    assert costs == [0, 2 * 3 * 5 * 8 * 4, 0, 2 * 3 * 20 * 2]
    # the table has nearly all parameters, and does nearly nothing
    assert list(pipelinable.partition(1, 2, 0).state_dict()) == ["0.weight"]
    with_costs = pipelinable.partition(1, 2, 0, costs=costs)
    assert list(with_costs.state_dict()) == ["0.weight", "1.weight", "1.bias"]


def test_keywords_and_functions() -> None:
    model = GPT(32, 8, 16, 2, 2)
    ids = torch.zeros(2, 8, dtype=torch.long)
    with PipelinableContext() as pipelinable:
        GPT(32, 8, 16, 2, 2)
    pipelinable.to_layer_list(
        ["embed", "blocks.0", "blocks.1", (lambda x, mask: x, "behind"), "norm", "head"]
    )
    embed, first, second, norm, head = estimate_costs(pipelinable.layers, input_ids=ids)
    assert (embed, norm) == (0, 0)
    assert first == second > head == 2 * 2 * 8 * 16 * 32
    assert not any(p.is_meta for p in model.parameters())


class Slow(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(4, 4)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        end = time.process_time() + self.seconds
        while time.process_time() < end:
            pass
        return super().forward(x)


def test_times_are_measured() -> None:
    layers = nn.Sequential(Slow(0.0), Slow(0.05), nn.Identity(), Slow(0.02))
    quick, slow, nothing, middle = measure_costs(list(layers), torch.ones(2, 4), repeat=2)
    assert slow >= 0.05
    assert middle >= 0.02
    assert slow > quick
    assert slow > nothing
    assert all(p.grad is None for p in layers.parameters())
    with pytest.raises(ValueError, match="at least one repetition, got 0"):
        measure_costs(list(layers), torch.ones(2, 4), repeat=0)
