"""Outputs of layers that are changed in place, looked at through views, put away or handed on: the
weights are there in the backward pass.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossalai.testing import spawn
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from tests.zero.gemini.runs import launch

WIDTH = 8
TINY = {"min_chunk_size_mb": 0.0001, "search_range_mb": 0.0001, "hidden_dim": 8, "dtype": torch.float32}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class ReluInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        relu = nn.ReLU(inplace=True)
        return self.three(relu(self.two(relu(self.one(x)))))


class DropoutInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return self.two(nn.functional.dropout(self.one(x), 0.5, inplace=True))


class ViewOfOutput(TwoLayers):
    """As DeBERTa does."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.one(x).view(*x.shape[:-1], 2, WIDTH // 2).permute(0, 2, 1, 3)
        q /= 2
        k = self.two(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        k.mul_(torch.sigmoid(k.detach()))
        return self.three((q @ k.transpose(-1, -2)).mean(1) @ x)


class PartOfOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y[:, 0] = self.two(x)[:, 1]
        y[..., :2].zero_()
        return self.three(y)


class Residual(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y += self.two(y.clone())
        y.add_(self.three(x))
        return y


class Scaled(nn.Module):
    """Has parameters of its own, several nodes of the graph, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = (x * self.scale).view(-1, WIDTH)
        y.mul_(self.frozen)
        first, second = y.view(x.shape).chunk(2, 1)
        return first, second + self.shift, x


class ManyOutputs(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        first, second, same = self.scaled(self.one(x))
        same = same.clone()
        second[:, 0].mul_(2)
        return self.three(torch.cat([first, second.relu_()], 1) + same)


class InputInPlace(nn.Module):
    """Changes what it is given, and returns it or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.weight)
        x[:, 0].mul_(self.weight)
        return x[:, :]


class ChangesInput(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.inner = InputInPlace()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.one(x))
        y.tanh_()
        return self.two(self.inner(y.clone()).relu_())


@dataclass
class Scores:
    scores: Tensor
    hidden: list[Tensor]


Pair = namedtuple("Pair", "first, second")


class Odd(nn.Module):
    """Returns what torch's trees do not know, and puts a loss away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH) / WIDTH)
        self.extra: Any = None

    def forward(self, x: Tensor) -> Scores:
        self.extra = torch.tanh(x @ self.weight).mean(-1, keepdim=True)
        return Scores(x @ self.weight, [Pair(x * 2, torch.sigmoid(x @ self.weight))])


class OddOutputs(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.last = Odd(), Odd()

    def forward(self, x: Tensor) -> Tensor:
        found = self.odd(self.one(x))
        found.scores.mul_(2)
        self.last(found.scores)
        return found.scores + found.hidden[0].second + self.odd.extra + self.last.extra


class Positions(nn.Module):
    """Hands out its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.whole = nn.Parameter(torch.rand(16, WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        return self.weight[:length], self.whole


class WeightsAsOutput(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: Tensor) -> Tensor:
        some, whole = self.positions(x.shape[1])
        return self.two(torch.tanh(self.one(x) * some) * whole)


class Checkpointed(TwoLayers):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = ManyOutputs(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).view(*x.shape[:2], 2, WIDTH // 2)
        y *= 2
        y = checkpoint(self.inner, y.flatten(2), use_reentrant=self.reentrant)
        return self.two(y.relu() if self.reentrant else y.relu_())  # torch refuses the other


class CheckpointedReentrant(Checkpointed):
    def __init__(self) -> None:
        super().__init__(True)


HABITS = [
    ReluInPlace,
    DropoutInPlace,
    ViewOfOutput,
    PartOfOutput,
    Residual,
    ManyOutputs,
    ChangesInput,
    OddOutputs,
    WeightsAsOutput,
    Checkpointed,
    CheckpointedReentrant,
]


def deep(habit: type[nn.Module]) -> nn.Module:
    """Deep enough that weights of the first layers have left when the backward pass begins."""
    return nn.Sequential(*[habit() for _ in range(3)])


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(step))


def check_equal(
    model: nn.Module, policy: str, part: slice = slice(None), steps: int = 3, exact: bool = True
) -> None:
    serial = copy.deepcopy(model)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1)
    boosted = GeminiDDP(model, "cpu", policy, prefetch=0, **TINY)
    optimizer = GeminiOptimizer(torch.optim.SGD(boosted.unwrap().parameters(), lr=0.1), boosted)
    for step in range(steps):
        plain.zero_grad()
        serial(batch(step)).square().mean().backward()
        plain.step()
        optimizer.zero_grad()
        optimizer.backward(boosted(batch(step)[part]).square().mean())
        optimizer.step()
    found = boosted.state_dict(only_rank_0=False)
    for name, expected in serial.state_dict().items():
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(found[name], expected, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("habit", HABITS)
def test_outputs_may_be_changed_in_place(habit: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check_equal(deep(habit), "cpu")


def check_habits(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    own = slice(2 * rank, 2 * rank + 2)
    for habit in (ViewOfOutput, ManyOutputs, OddOutputs, WeightsAsOutput):
        torch.manual_seed(0)
        check_equal(deep(habit), "cuda", own, exact=False)  # on several ranks chunks come and go here too


def test_outputs_may_be_changed_in_place_on_several_ranks() -> None:
    spawn(check_habits, 2)


def test_deberta_divides_in_place() -> None:
    from transformers import DebertaConfig, DebertaForMaskedLM

    config = DebertaConfig(
        vocab_size=24,
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = DebertaForMaskedLM(config)
    serial = copy.deepcopy(model)
    words = torch.arange(24).view(2, 12)
    serial(input_ids=words, labels=words).loss.backward()
    boosted = GeminiDDP(model, "cpu", "cpu", prefetch=0, **TINY)
    optimizer = GeminiOptimizer(torch.optim.SGD(boosted.unwrap().parameters(), lr=1.0), boosted)
    optimizer.backward(boosted(input_ids=words, labels=words).loss)
    optimizer.step()
    found = boosted.state_dict()
    for name, param in serial.named_parameters():
        expected = param.detach() - (0 if param.grad is None else param.grad)
        torch.testing.assert_close(found[name], expected, msg=lambda m, n=name: f"{n}: {m}")
