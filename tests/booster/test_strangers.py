"""Optimizers with parameters that are not in the model: those that were built too early are refused, those of
a criterion are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.nn import parallelize
from colossalai.nn.policies import Cut, Policy
from colossalai.pipeline import split_model
from colossalai.testing import spawn
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from tests.pipeline.doors import POLICY, Words

PLUGINS: dict[str, Callable[[], Plugin] | None] = {
    "none": None,
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": lambda: LowLevelZeroPlugin(1, "fp32"),
    "zero2-bf16": lambda: LowLevelZeroPlugin(2, "bf16"),
    "gemini": lambda: GeminiPlugin("cpu", precision="fp32"),
}
REPLACED = (
    r"other parameters after the optimizer was built \(colossalai.nn.parallelize, split_model, tie_weights"
)


def _boost(plugin: str, *parts: Any) -> Any:
    make = PLUGINS[plugin]
    return Booster(None if plugin == "gemini" else "cpu", plugin=make and make()).boost(*parts)


def _launch(rank: int, world_size: int, port: int, config: dict[str, Any]) -> None:
    colossalai.launch(config, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)


def _too_early(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    policy = Policy(("words",), {"up": Cut("expand"), "down": Cut("contract")})

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words(True)
        optimizer = torch.optim.AdamW(model.parameters())
        return parallelize(model, policy=policy), optimizer

    match = (
        r"holds \d+ parameters that are not in the model \(Words\).*"
        rf" lacks \d+ of the model \(blocks.*{REPLACED}"
    )
    for plugin in PLUGINS:
        with pytest.raises(ValueError, match=match):
            _boost(plugin, *parts())
    for zero in (None, {"level": 1}, {"level": 3}):
        gpc.load_config({**gpc.config, **({} if zero is None else {"zero": zero})})
        with pytest.raises(ConfigException, match=match):
            colossalai.initialize(*parts(), verbose=False)
    model, optimizer = parts()
    with pytest.raises(ValueError, match=match):
        zero_optim_wrapper(zero_model_wrapper(model), optimizer)


def test_an_optimizer_from_before_parallelize_is_refused_at_every_door() -> None:
    spawn(_too_early, 2)


def _before_split(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2})
    match = "that are not in this stage of the pipeline|" + REPLACED
    for plugin in ("none", "ddp", "zero1"):
        whole = Words(False)
        optimizer = torch.optim.AdamW(whole.parameters())
        with pytest.raises(ValueError, match=match):
            _boost(plugin, split_model(whole, policy=POLICY), optimizer)
    whole = Words(False)
    optimizer = torch.optim.AdamW(whole.parameters())
    with pytest.raises(ConfigException, match=match):
        colossalai.initialize(split_model(whole, policy=POLICY), optimizer, verbose=False)


def test_an_optimizer_from_before_split_model_is_refused_at_both_doors() -> None:
    spawn(_before_split, 2)


def test_what_is_left_out_of_the_optimizer_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    _boost("none", model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def test_a_layer_that_was_replaced_is_missed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(2, 3)
    with pytest.raises(
        ValueError, match=r"holds 2 parameters that are not in .* lacks 2 of the model \(1.weight, 1.bias\)"
    ):
        _boost("none", model, optimizer)


class Weighted(nn.Module):
    """A loss of two parts, whose weights are learned."""

    def __init__(self, seed: float = 0.0) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.5, -0.5]) + seed)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        parts = torch.stack(
            [nn.functional.cross_entropy(scores.float(), labels), scores.float().square().mean()]
        )
        return (parts * torch.exp(-self.scales) + self.scales).sum()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _train(
    model: nn.Module, criterion: nn.Module, backward: Any, optimizer: Any, rank: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        backward(criterion(model(x.chunk(size)[rank]), y.chunk(size)[rank]))
        optimizer.step()
        optimizer.zero_grad()


def _criterion(rank: int, world_size: int, port: int) -> None:
    _launch(rank, world_size, port, {})
    serial, learned = _model(), Weighted()
    plain = torch.optim.SGD([*serial.parameters(), *learned.parameters()], lr=0.1)
    _train(serial, learned, lambda loss: loss.backward(), plain, 0, 1)
    for plugin in ("ddp", "zero1", "zero2-bf16"):
        model, criterion = _model(), Weighted(float(rank))  # replicas begin alike
        optimizer: Any = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        boosted = _boost(plugin, model, optimizer, criterion)
        _train(boosted.model, criterion, boosted.optimizer.backward, boosted.optimizer, rank, world_size)
        rough = 2e-2 if "bf16" in plugin else 1e-5
        assert criterion.scales.dtype is torch.float32
        torch.testing.assert_close(criterion.scales, learned.scales, rtol=rough, atol=rough)
        for p, expected in zip(model.parameters(), serial.parameters(), strict=True):
            torch.testing.assert_close(p.detach().float(), expected.detach(), rtol=rough, atol=rough)
        others = [torch.empty(2) for _ in range(world_size)]
        dist.all_gather(others, criterion.scales.detach())
        assert torch.equal(*others)
    for plugin in ("fsdp", "gemini"):
        model, criterion = _model(), Weighted()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        with pytest.raises(
            ValueError, match=r"parameter of shape \(2,\) that is not in the model, so .* would not average"
        ):
            _boost(plugin, model, optimizer, criterion)


def test_a_criterion_learns_under_every_plan_or_is_refused() -> None:
    spawn(_criterion, 2)


def test_a_criterion_beside_a_model_that_is_partly_trained() -> None:
    model, criterion = _model(), Weighted()
    head: nn.Module = model[2]  # type: ignore[index]
    _boost("none", model, torch.optim.SGD([*head.parameters(), *criterion.parameters()], lr=0.1), criterion)


def test_an_optimizer_of_two_models() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    _boost("none", one, torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1))
