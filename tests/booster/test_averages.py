"""Averages of the weights (EMA) and copies of a boosted model are those of the serial script."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.testing import spawn

DECAY, STEPS = 0.7, 3
PAGE = Path(__file__).parents[2] / "docs/source/en" / "booster.md"


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=draw), torch.randint(3, (4,), generator=draw)


def serial() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The weights after training, their average by torch, and one that begins with the first weights."""
    model, optimizer = build()
    by_hand = copy.deepcopy(model.state_dict())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        train(model, optimizer, step, torch.Tensor.backward)
        averaged.update_parameters(model)
        for name, value in model.state_dict().items():
            by_hand[name].lerp_(value, 1 - DECAY)
    return model.state_dict(), averaged.module.state_dict(), by_hand


def train(model: nn.Module, optimizer: Any, step: int, backward: Any, rank: int | None = None) -> None:
    x, y = batch(step)
    own = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    optimizer.zero_grad()
    backward(nn.functional.cross_entropy(model(x[own]), y[own]))
    optimizer.step()


def boosted(plugin: Plugin) -> tuple[Booster, nn.Module, Any]:
    booster = Booster(device=None if isinstance(plugin, GeminiPlugin) else "cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(*build())
    return booster, model, optimizer


def check_averaged_model(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    weights, average, _ = serial()
    for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(1, "fp32"), LowLevelZeroPlugin(2, "fp32")):
        booster, model, optimizer = boosted(plugin)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for step in range(STEPS):
            train(model, optimizer, step, lambda loss: booster.backward(loss, optimizer), rank)  # noqa: B023
            averaged.update_parameters(model)
            if step == 0:
                teacher = copy.deepcopy(model)
                first = {name: value.clone() for name, value in model.state_dict().items()}
        torch.testing.assert_close(model.state_dict(), weights)
        torch.testing.assert_close(averaged.module.state_dict(), average)
        torch.testing.assert_close(teacher.state_dict(), first, rtol=0, atol=0)
        with torch.no_grad():
            assert not torch.equal(teacher(batch(0)[0]), model(batch(0)[0]))
    for refusing in (TorchFSDPPlugin(), GeminiPlugin(device="cpu", precision="fp32")):
        _, model, _ = boosted(refusing)
        with pytest.raises((TypeError, RuntimeError), match=r"cannot be copied.*one of model.state_dict"):
            AveragedModel(model)


def test_averaged_model_and_copies() -> None:
    spawn(check_averaged_model, 2)


def check_average_of_states(rank: int, world_size: int, port: int, program: str) -> None:
    """The lines of booster.md, under every plugin; training goes on as if there had been none."""
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    weights, _, average = serial()
    plugins = (
        TorchDDPPlugin(),
        TorchFSDPPlugin(),
        LowLevelZeroPlugin(2, "fp32"),
        GeminiPlugin(device="cpu", precision="fp32"),
        GeminiPlugin(device="cpu", precision="fp32", placement_policy="cuda"),
    )
    for plugin in plugins:
        booster, model, optimizer = boosted(plugin)
        seen: list[dict[str, Tensor]] = []
        namespace: dict[str, Any] = {
            "model": model,
            "decay": DECAY,
            "torch": torch,
            "training": range(STEPS),
            "step": lambda step: train(
                model,  # noqa: B023
                optimizer,  # noqa: B023
                step,
                lambda loss: booster.backward(loss, optimizer),  # noqa: B023
                rank,
            ),
            "evaluate": lambda: seen.append(whole(model)),  # noqa: B023
        }
        exec(compile(program, PAGE.name, "exec"), namespace)
        last = whole(model)
        if rank == 0:
            torch.testing.assert_close(seen[0], average, msg=lambda text: f"{type(plugin)}: {text}")  # noqa: B023
            torch.testing.assert_close(last, weights, msg=lambda text: f"{type(plugin)}: {text}")  # noqa: B023
        dist.barrier()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in model.state_dict().items()
    }


def test_an_average_of_states_under_every_plugin() -> None:
    (program,) = re.findall(r"```python\n(average = .*?)```", PAGE.read_text(), flags=re.DOTALL)
    spawn(check_average_of_states, 2, program=program)
