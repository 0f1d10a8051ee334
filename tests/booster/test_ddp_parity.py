"""Data parallel training equals serial training with the ranks' batches joined."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.interface import ModelWrapper
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import ParityError, check_plan
from tests.booster.plans import Batch, Case, PluginRun, clipping, launch, loss_of, mlp, problem, sgd


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def batch_norm() -> nn.Module:
    # no bias before the norm: it would have no gradient but rounding errors
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def loss_by_rank(model: nn.Module, batch: Batch) -> Tensor:
    """What a serial model must compute so that batch statistics are those of each rank's part."""
    world_size = dist.get_world_size()
    parts = zip(batch[0].chunk(world_size), batch[1].chunk(world_size), strict=True)
    return torch.stack([loss_of(model, part) for part in parts]).mean()


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


CASES = {
    "AdamW": Case(),
    "SGD with momentum": Case(lambda: problem(optimizer=sgd)),
    "accumulation": Case(lambda: problem(sizes=(16, 16, 8)), run={"accumulate": 2}),
    "clipping by norm": clipping(lambda p: clip_grad_norm_(p, 0.05), lambda o: o.clip_grad_by_norm(0.05)),
    "clipping by 1-norm": clipping(
        lambda p: clip_grad_norm_(p, 0.5, 1), lambda o: o.clip_grad_by_norm(0.5, 1)
    ),
    "clipping by value": clipping(lambda p: clip_grad_value_(p, 0.01), lambda o: o.clip_grad_by_value(0.01)),
    "unused parameters": Case(lambda: problem(HalfUsed), plugin={"find_unused_parameters": True}),
    "frozen parameters": Case(lambda: problem(partly_frozen)),
    "tied parameters": Case(lambda: problem(tied)),
    "batch statistics": Case(lambda: problem(batch_norm, (16, 16, 8), loss=loss_by_rank)),
    "buckets as gradients": Case(plugin={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "static graph": Case(plugin={"static_graph": True}),
}


def _check(case: Case, plugin: type[TorchDDPPlugin] = TorchDDPPlugin) -> None:
    check_plan(case.problem(), lambda p: PluginRun(p, plugin(**case.plugin), **case.run))


def _all_cases(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    for name, case in CASES.items():
        try:
            _check(case)
        except ParityError as error:
            raise ParityError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ddp_equals_serial(world_size: int) -> None:
    spawn(_all_cases, world_size)


class _NeverSynchronized(ModelWrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.module.no_sync():  # type: ignore[operator]
            return self.module(*args, **kwargs)


class _Selfish(TorchDDPPlugin):
    """Keeps the gradients of each rank for itself."""

    def configure(self, model: nn.Module, *args: Any) -> Any:
        ddp, *rest = super().configure(model, *args)
        return _NeverSynchronized(ddp), *rest


class _Forgetful(TorchDDPPlugin):
    """Drops what was accumulated before."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        model.zero_grad()
        return super().no_sync(model)


def _broken(rank: int, world_size: int, port: int, plugin: type[TorchDDPPlugin], accumulate: int) -> None:
    launch(rank, world_size, port)
    _check(Case(lambda: problem(sizes=(24, 24)), run={"accumulate": accumulate}), plugin)


@pytest.mark.parametrize(("plugin", "accumulate"), [(_Selfish, 1), (_Forgetful, 3)])
def test_the_check_notices_wrong_gradients(plugin: type[TorchDDPPlugin], accumulate: int) -> None:
    with pytest.raises(RankError, match=r"gradient at step 0 of '0.weight' differs from the serial model's"):
        spawn(_broken, 2, plugin=plugin, accumulate=accumulate)


def test_one_rank_alone_does_not_show_that_averaging_is_missing() -> None:
    spawn(_broken, 1, plugin=_Selfish, accumulate=1)


def _unclipped(rank: int, world_size: int, port: int) -> None:
    launch(rank, world_size, port)
    _check(clipping(lambda p: clip_grad_norm_(p, 0.05), lambda o: None))


def test_the_check_notices_missing_clipping() -> None:
    with pytest.raises(RankError, match="differs from the serial model's"):
        spawn(_unclipped, 2)
