"""Branches that not all ranks take: the same result as in serial training where that is possible, one error everywhere where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.nn.optimizer import HybridAdam
from colossalai.testing import spawn
from colossalai.zero import GeminiDDP, GeminiOptimizer
from tests.zero.gemini.runs import launch

WIDTH = 16
TINY = {"min_chunk_size_mb": 0.0001, "search_range_mb": 0.0001, "hidden_dim": 8, "dtype": torch.float32}


class Experts(nn.Module):
    """Each half of a batch goes to experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        y = torch.tanh(self.gate(x))
        for i in chosen:
            y = y + self.experts[i](y)
        return y.square().mean()


# for each step: the experts of the first and of the second rank
ROUTES = [([0], [1, 2]), ([1], []), ([], [2, 0]), ([0, 1, 2], [2])]


def half(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def serial() -> dict[str, Tensor]:
    model = Experts()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    for step, route in enumerate(ROUTES):
        optimizer.zero_grad()
        sum(model(half(step, rank), route[rank]) / 2 for rank in range(2)).backward()
        optimizer.step()
    return model.state_dict()


def train(rank: int, routes: list[Any], policy: str, **options: Any) -> dict[str, Tensor]:
    model = GeminiDDP(Experts(), "cpu", policy, **{**TINY, **options})
    optimizer = GeminiOptimizer(HybridAdam(model.unwrap().parameters(), lr=1e-2), model)
    for step, route in enumerate(routes):
        optimizer.backward(model(half(step, rank), route[rank]))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(only_rank_0=False)


def check_branches(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    expected = serial()
    for policy in ("cpu", "cuda", "auto"):
        found = train(rank, ROUTES, policy, strict_ddp_mode=True)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    # all experts in one chunk, which every rank uses: fine without
    found = train(rank, ROUTES, "cpu", min_chunk_size_mb=1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_strict_mode_lets_every_rank_take_its_own_branch() -> None:
    spawn(check_branches, 2)


def check_refused(rank: int, world_size: int, port: int, routes: list[Any]) -> None:
    launch(rank, world_size, port)
    with pytest.raises(
        RuntimeError, match=r"same order, but this one .* while another .*strict_ddp_mode=True"
    ):
        train(rank, routes, "cpu", prefetch=0)


@pytest.mark.parametrize(
    "routes",
    [
        [([0, 2], [1, 2])],  # equal in size: they would be mixed
        [([0, 2], [2])],
        [([0], [0]), ([0], [0]), ([0, 1], [0, 2])],  # after the first step
        [([0], [0, 1])],  # one begins its backward pass
    ],
)
def test_other_chunks_on_other_ranks_are_refused_everywhere(routes: list[Any]) -> None:
    spawn(check_refused, 2, routes=routes, timeout=40)
