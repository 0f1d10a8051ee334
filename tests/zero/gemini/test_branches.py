"""Branches that not all ranks take: the same result as in serial training where that is possible, one error
everywhere where it is not.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
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


class Deep(nn.Module):
    """A batch goes through some of the layers, in some order."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for i in chosen:
            x = x + torch.tanh(self.layers[i](x))
        return x.square().mean()


ALL = list(range(6))
# what the second of three ranks does in the third step, after two in which all did the same
HABITS: dict[str, dict[str, Any]] = {
    "skips": {"chosen": [0, 1, 2, 4, 5]},
    "skips the last": {"chosen": ALL[:-1]},
    "another order": {"chosen": [0, 2, 1, 3, 4, 5]},
    "no backward": {"backward": False},
    "no backward and no step": {"backward": False, "step": False},
    "an inference that others skip": {"infer": True},
    "no backward under no_sync": {"backward": False, "accumulate": True},
}


def take_steps(rank: int, world_size: int, habit: dict[str, Any], **options: Any) -> None:
    """Three steps, equal to those of the serial model."""
    model, plain = GeminiDDP(Deep(), "cpu", **{**TINY, **options}), Deep()
    optimizer = GeminiOptimizer(HybridAdam(model.unwrap().parameters(), lr=1e-2), model)
    serial = HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(3):
        losses = []
        for r in range(world_size):
            does = {"chosen": ALL, "backward": True, "step": True, **(habit if step == 2 and r == 1 else {})}
            if does["backward"]:
                losses.append(plain(half(step, r), does["chosen"]) / world_size)
            if r != rank:
                continue
            if does.get("infer"):
                with torch.no_grad():
                    model(half(step, r), does["chosen"])
            with model.no_sync() if does.get("accumulate") else nullcontext():
                loss = model(half(step, r), does["chosen"])
                if does["backward"]:
                    optimizer.backward(loss)
            if does["step"]:
                optimizer.step()
            optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        serial.step()
        serial.zero_grad()
    found = model.state_dict(only_rank_0=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def check_three(rank: int, world_size: int, port: int, habit: str, is_right: bool, **options: Any) -> None:
    launch(rank, world_size, port)
    if is_right:
        take_steps(rank, world_size, HABITS[habit], **options)
        return
    with pytest.raises(RuntimeError, match="must use them in the same order, but this one"):
        take_steps(rank, world_size, HABITS[habit], **options)


@pytest.mark.parametrize(
    ("habit", "is_right", "options"),
    [
        # weights of layers that one rank skips are there, or fetched ahead by all: its gradients come at the
        # end
        ("skips", True, {"placement_policy": "cuda", "prefetch": 2}),
        ("skips the last", True, {"prefetch": 4, "min_chunk_size_mb": 0.002}),
        ("skips", True, {"strict_ddp_mode": True}),
        ("another order", True, {"strict_ddp_mode": True, "dtype": torch.float32}),
        ("another order", False, {"prefetch": 0}),
        ("no backward", False, {"prefetch": 2}),
        ("no backward and no step", False, {"min_chunk_size_mb": 1}),  # nothing has to be fetched
        ("no backward and no step", False, {"strict_ddp_mode": True}),
        ("no backward under no_sync", False, {"prefetch": 2}),
        ("an inference that others skip", False, {"prefetch": 2}),
    ],
)
def test_three_ranks_never_wait_for_each_other(habit: str, is_right: bool, options: dict[str, Any]) -> None:
    spawn(check_three, 3, habit=habit, is_right=is_right, timeout=60, **options)


class Fork(nn.Module):
    """Two layers, of which a pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = self.first(x)
        return self.head(x + (self.left(x) if left else self.right(x)).tanh())


def check_early_updates(rank: int, world_size: int, port: int) -> None:
    """A rank that updates its part of a chunk in the backward pass tells the others that it has used it."""
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    torch.manual_seed(0)
    serial, raw = Fork(), Fork()
    raw.load_state_dict(serial.state_dict())
    plain = torch.optim.SGD(serial.parameters(), lr=0.1)
    options = {"min_chunk_size_mb": 0.0002, "search_range_mb": 0.0002, "update_in_backward": True}
    booster = Booster(plugin=GeminiPlugin(device="cpu", precision="fp32", **options))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for step in range(3):
        x = torch.randn(world_size, 4, generator=torch.Generator().manual_seed(step))
        losses = [serial(x[i], left=i == 0).square().mean() for i in range(world_size)]
        torch.stack(losses).mean().backward()
        plain.step()
        plain.zero_grad()
        booster.backward(model(x[rank], left=rank == 0).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict(only_rank_0=False).items():
        torch.testing.assert_close(value, serial.state_dict()[name])
    # also on ranks that have updated nothing yet
    booster.backward(model(x[rank], left=rank == 0).square().mean(), optimizer)
    with pytest.raises(RuntimeError, match="clip_grad_by_norm comes too late: with update_in_backward=True"):
        optimizer.clip_grad_by_norm(1.0)


def test_branches_with_updates_in_the_backward_pass() -> None:
    spawn(check_early_updates, 2)
