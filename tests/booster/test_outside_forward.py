"""Weights that a script uses outside of the model's forward, in its loss: as in serial training, or
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.testing import spawn
from tests.booster.plans import launch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.scale


def whole(weight: Any) -> Tensor:
    found: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return found


def other(model: Any, words: Tensor) -> Tensor:
    given = {"scale": torch.full((4,), 2.0), "blocks.0.bias": torch.ones(4)}
    found: Tensor = functional_call(model, given, (words,))
    return found.sum()


Loss = Callable[[Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "decay": lambda m, x: m(x).sum() + (m.embed.weight**2).sum(),
    "decay of a block": lambda m, x: m(x).sum() + (m.blocks[0].weight ** 2).sum(),
    "decay of all": lambda m, x: m(x).sum() + sum((p**2).sum() for p in m.parameters()),
    "gathered": lambda m, x: m(x).sum() + (whole(m.blocks[0].weight) ** 2).sum(),
    "head": lambda m, x: F.cross_entropy(m(x) @ m.embed.weight.t(), x),
    "functional_call": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)).sum(),
    "functional_call of the user's": lambda m, x: functional_call(
        m.unwrap() if hasattr(m, "unwrap") else m, dict(m.named_parameters()), (x,)
    ).sum(),
    "functional_call with others": other,
}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero-1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero-2": lambda: LowLevelZeroPlugin(2, "fp32"),
    "gemini": lambda: GeminiPlugin(device="cpu", precision="fp32"),
}
CHUNK, CUT = "needs the values of '", "computes with a weight that is cut"
KEEPS = "keeps the parameters that the model had at boost"
# Cells of (loss, plugin) that are refused, and how.
REFUSED = {
    ("decay", "gemini"): CHUNK,
    ("decay of a block", "gemini"): CHUNK,
    ("decay of a block", "fsdp"): CUT,
    ("decay of all", "gemini"): CHUNK,
    ("decay of all", "fsdp"): CUT,
    ("gathered", "gemini"): CHUNK,
    ("head", "gemini"): CHUNK,
    ("functional_call", "fsdp"): KEEPS,
    **{("functional_call with others", name): KEEPS for name in PLUGINS},
}

WORDS = torch.arange(8).view(2, 4)


def serial(loss: Loss) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (torch.stack([loss(model, words) for words in WORDS]).mean()).backward()
        optimizer.step()
    return model.state_dict()


def trained(rank: int, plugin: Plugin, loss: Loss) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inner = Net()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    assert optimizer is not None
    for _ in range(2):
        optimizer.zero_grad()
        booster.backward(loss(model, WORDS[rank]), optimizer)
        optimizer.step()
    options = {"only_rank_0": False} if isinstance(plugin, GeminiPlugin) else {}
    return {name: whole(tensor) for name, tensor in model.state_dict(**options).items()}


def check(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name, loss in LOSSES.items():
        expected = serial(loss)
        for plan, plugin in PLUGINS.items():
            print(name, "under", plan)
            if (refusal := REFUSED.get((name, plan))) is not None:
                with pytest.raises(RuntimeError, match=refusal):
                    trained(rank, plugin(), loss)
                continue
            found = trained(rank, plugin(), loss)
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key],
                    value,
                    msg=lambda text: f"{name} under {plan}, {key}: {text}",  # noqa: B023
                )


def test_weights_outside_of_the_forward_are_right_or_refused() -> None:
    spawn(check, 2)
