"""The columns of the table: how the same script is written under each plan, at both doors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.checkpoint_io import GatheredCheckpointIO
from colossalai.nn import parallelize
from colossalai.pipeline import split_model
from tests.habits.habit import Habit
from tests.habits.models import policy_of
from tests.habits.script import CannotBeWritten, Script

TINY = {"min_chunk_size_mb": 64 * 4 / 1024**2, "search_range_mb": 64 * 4 / 1024**2}


@dataclass(frozen=True)
class Plan:
    """A column.

    Args:
        title: its name on the page.
        config: what the job is launched with.
        plugin: of the booster; None is a booster without one.
        whole_weights: whether every rank holds its weights all the time, to be compared at the end.
    """

    title: str
    plugin: Callable[[], Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    engine_config: Mapping[str, Any] | None = None
    whole_weights: bool = True
    kind: str = "data"  # "data", "tensor" or "pipeline"


def _gemini(policy: str) -> Plan:
    zero = {"level": 3, "precision": "fp32", "placement_policy": policy, "device": "cpu", **TINY}
    return Plan(
        f"Gemini {policy}",
        lambda: GeminiPlugin(device="cpu", precision="fp32", placement_policy=policy, **TINY),
        engine_config={"zero": zero},
        whole_weights=False,
    )


def _zero(stage: int) -> Plan:
    return Plan(
        f"ZeRO-{stage}",
        lambda: LowLevelZeroPlugin(stage=stage, precision="fp32"),
        engine_config={"zero": {"level": stage, "precision": "fp32"}},
    )


_TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
_PIPELINE = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}

PLANS: dict[str, Plan] = {
    "ddp": Plan("DDP", TorchDDPPlugin, engine_config={}),
    "fsdp": Plan("FSDP", TorchFSDPPlugin, whole_weights=False),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "gemini-cpu": _gemini("cpu"),
    "gemini-auto": _gemini("auto"),
    "gemini-cuda": _gemini("cuda"),
    "tensor": Plan("tensor", None, _TENSOR, engine_config=_TENSOR, kind="tensor"),
    "pipeline": Plan("pipeline", None, _PIPELINE, engine_config=_PIPELINE, kind="pipeline"),
}


class Planned(Script):
    """The script under a plan."""

    serial = False

    def __init__(self, habit: Habit, folder: Path, plan: Plan) -> None:
        super().__init__(habit, folder)
        self.plan = plan
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.replicas = self.world_size if plan.kind == "data" else 1

    def build(self) -> nn.Module:
        model, kind = super().build(), self.plan.kind
        if kind == "tensor":
            return parallelize(model, policy=policy_of(self.habit.model))
        return split_model(model, policy=policy_of(self.habit.model)) if kind == "pipeline" else model

    def loss(self, batch: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        self.by_hand()
        return super().loss(batch, **options)

    def by_hand(self) -> None:
        if self.plan.kind == "pipeline":
            raise CannotBeWritten

    def passes(self, batch: tuple[Tensor, Tensor] | None = None, weight: float = 1.0) -> None:
        if self.plan.kind != "pipeline":
            super().passes(batch, weight)
            return
        x, y = batch or self.batch()
        if self.habit.model == "gpt2":
            loss = self.execute(iter([{"input_ids": x, "labels": y}]), None, weight)
        else:
            loss = self.execute(iter([({"x": x}, y)]), _criterion, weight)
        self.mean("loss", loss if weight == weight else 0.0)

    def execute(self, data: Any, criterion: Any, weight: float) -> Any:
        raise NotImplementedError

    def agreement(self) -> None:
        if self.plan.whole_weights:
            super().agreement()

    def weights(self) -> dict[str, Tensor] | None:
        path = self.folder / "final.bin"
        self.save_model(path)
        return torch.load(path, weights_only=True) if self.rank == 0 else None

    def save_model(self, path: Path) -> None:
        raise NotImplementedError


class Boosted(Planned):
    """The script with ``Booster``."""

    booster: Booster

    def begin(self) -> None:
        self.booster = Booster(
            **({} if self.plan.title.startswith("Gemini") else {"device": "cpu"}),
            plugin=self.plan.plugin() if self.plan.plugin else None,
        )

    def wrap(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(
            model, optimizer, lr_scheduler=scheduler
        )

    def backward(self, loss: Tensor) -> None:
        self.booster.backward(loss, self.optimizer)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.booster.no_sync(self.model)

    def execute(self, data: Any, criterion: Any, weight: float) -> Any:
        criterion = _weighted(criterion, weight)
        result = self.booster.execute_pipeline(data, self.model, criterion, self.optimizer)["loss"]
        return None if result is None else result / weight

    def save_model(self, path: Path) -> None:
        self.booster.save_model(self.model, path)


class Engined(Planned):
    """The script with ``colossalai.initialize``."""

    engine: Any

    def wrap(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        self.engine, _, _, self.scheduler = colossalai.initialize(
            model, optimizer, lr_scheduler=scheduler, verbose=False
        )
        self.model, self.optimizer = self.engine.model, self.engine.optimizer

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def no_sync(self) -> AbstractContextManager[None]:
        # as with a booster, there is nothing to synchronize without replicas
        return self.model.no_sync() if self.plan.kind == "data" else nullcontext()

    def execute(self, data: Any, criterion: Any, weight: float) -> Any:
        self.engine._criterion = _weighted(criterion, weight)
        _, _, result = self.engine.execute_schedule(data, return_output_label=False)
        return None if result is None else result / weight

    def save_model(self, path: Path) -> None:
        GatheredCheckpointIO().save_model(self.model, path)


def _criterion(output: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(output, label)


def _weighted(criterion: Any, weight: float) -> Any:
    if criterion is None or weight == 1.0:
        return criterion
    return lambda output, label: criterion(output, label) * weight
