"""Data parallel training equals serial training with the ranks' batches joined."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.interface import ModelWrapper
from colossalai.testing import RankError, spawn
from tests.booster.common import Scenario, check_equal_to_serial, launch, mlp


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


SCENARIOS = {
    "SGD with momentum": Scenario(),
    "AdamW": Scenario(optimizer=adamw),
    "accumulation": Scenario(accumulate=2, sizes=(16, 16, 8)),
    "clipping by norm": Scenario(clip=lambda o: o.clip_grad_by_norm(0.05)),
    "clipping by value": Scenario(clip=lambda o: o.clip_grad_by_value(0.01)),
    "accumulation and clipping": Scenario(
        accumulate=2, clip=lambda o: o.clip_grad_by_norm(0.05), optimizer=adamw
    ),
    "unused parameters": Scenario(build=HalfUsed, options={"find_unused_parameters": True}),
    "frozen parameters": Scenario(build=partly_frozen),
    "tied parameters": Scenario(build=tied),
    "batch statistics": Scenario(build=batch_norm, sizes=(16, 16, 8), rank_parts=True),
    "buckets as gradients": Scenario(options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "static graph": Scenario(options={"static_graph": True}),
}


def make_booster(**options: Any) -> Booster:
    return Booster(device="cpu", plugin=TorchDDPPlugin(**options))


def _all_scenarios(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name, scenario in SCENARIOS.items():
        try:
            check_equal_to_serial(scenario, make_booster, rank, world_size)
        except Exception as error:
            raise AssertionError(f"scenario {name!r}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ddp_equals_serial(world_size: int) -> None:
    spawn(_all_scenarios, world_size)


class _NeverSynchronized(ModelWrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.module.no_sync():  # type: ignore[operator]
            return self.module(*args, **kwargs)


class _BrokenPlugin(TorchDDPPlugin):
    def configure(self, model: nn.Module, *args: Any) -> Any:
        ddp, *rest = super().configure(model, *args)
        return _NeverSynchronized(ddp), *rest


class _ForgetfulPlugin(TorchDDPPlugin):
    """Drops what was accumulated before."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        model.zero_grad()
        return super().no_sync(model)


def _broken(rank: int, world_size: int, port: int, plugin: type[TorchDDPPlugin], accumulate: int) -> None:
    launch(rank, world_size, port)
    scenario = Scenario(accumulate=accumulate, sizes=(24, 24))
    check_equal_to_serial(scenario, lambda: Booster(device="cpu", plugin=plugin()), rank, world_size)


@pytest.mark.parametrize(("plugin", "accumulate"), [(_BrokenPlugin, 1), (_ForgetfulPlugin, 3)])
def test_the_check_notices_wrong_gradients(plugin: type[TorchDDPPlugin], accumulate: int) -> None:
    with pytest.raises(RankError, match=r"gradient of 0.weight at step 0"):
        spawn(_broken, 2, plugin=plugin, accumulate=accumulate)


def test_one_rank_alone_does_not_show_that_averaging_is_missing() -> None:
    spawn(_broken, 1, plugin=_BrokenPlugin, accumulate=1)
