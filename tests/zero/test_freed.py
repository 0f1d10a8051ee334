"""Models, weights and gradients go when nobody holds them any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.zero import GeminiDDP, GeminiOptimizer, LowLevelZeroOptimizer


def low_level(stage: int) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, LowLevelZeroOptimizer(optimizer, partition_grad=stage == 2)

    return build


def gemini() -> tuple[nn.Module, Any]:
    model = GeminiDDP(nn.Linear(4, 4), "cpu", dtype=torch.float32)
    return model, GeminiOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("build", [low_level(1), low_level(2), gemini])
def test_all_is_freed(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, optimizer = build()
    optimizer.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.settle()  # jobs of Gemini hold what they update
    pieces = [weakref.ref(p) for group in optimizer.param_groups for p in group["params"]]
    refs = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters()), *pieces]
    del model, optimizer
    gc.collect()
    left = [ref for ref in refs if ref() is not None]
    assert not left
