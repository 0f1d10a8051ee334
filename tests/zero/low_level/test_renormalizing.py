"""Embeddings that write to their own weights: the same as in serial training, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.testing import spawn
from colossalai.zero import zero_model_wrapper
from tests.zero.low_level.problems import launch


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2))


def check_refused(rank: int, world_size: int, port: int) -> None:
    launch()
    told = "'0' has max_norm=0.5, so its forward pass writes to its weight, differently on each of 2 ranks"
    model = build()
    with pytest.raises(ValueError, match=told):
        Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="fp32")).boost(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
    for stage in (1, 2):
        with pytest.raises(ValueError, match=told):
            zero_model_wrapper(build(), stage)


def test_several_ranks_refuse_it() -> None:
    spawn(check_refused, 2)


def check_alone(rank: int, world_size: int, port: int) -> None:
    launch()
    serial, model = build(), build()
    plain = torch.optim.SGD(serial.parameters(), lr=0.1)
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(precision="fp32"))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        words = torch.tensor([step, step + 1])
        serial(words).square().sum().backward()
        plain.step()
        plain.zero_grad()
        booster.backward(boosted(words).square().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for got, expected in zip(boosted.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_one_rank_is_like_serial_training() -> None:
    spawn(check_alone, 1)
