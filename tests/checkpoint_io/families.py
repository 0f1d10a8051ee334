"""Plan families for the tests of checkpoints: one small model, trained under each to the same losses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.checkpoint_io.runs.manifest import read_manifest
from colossalai.checkpoint_io.runs.reading import RunReader
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer import partition_batch
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing.boosted import _part
from colossalai.testing.pipelined import cut
from tests.pipeline.plans import HIDDEN, Block, launch, to_tensor_parallel

VOCABULARY, BATCH = 16, 8


@dataclass(frozen=True)
class Family:
    """How many ranks, the config they are launched with, and the plugin."""

    ranks: int
    parallel: dict[str, Any] = field(default_factory=dict)
    plugin: Callable[[], Plugin] | None = None
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.parallel.get("pipeline", {}).get("size", 1)


def _tensor(mode: str, size: int, **options: Any) -> dict[str, Any]:
    return {"tensor": {"mode": mode, "size": size, **options}}


def _pipeline(schedule: str, size: int = 2) -> dict[str, Any]:
    return {"pipeline": {"size": size, "schedule": schedule}}


DDP, FSDP = TorchDDPPlugin, TorchFSDPPlugin
ZERO1, ZERO2 = (partial(LowLevelZeroPlugin, stage=stage, precision="fp32") for stage in (1, 2))
GEMINI = partial(GeminiPlugin, precision="fp32", placement_policy="cpu")
FAMILIES = {
    "serial": Family(1),
    "ddp2": Family(2, plugin=DDP),
    "ddp4": Family(4, plugin=DDP),
    "fsdp2": Family(2, plugin=FSDP),
    "fsdp4": Family(4, plugin=FSDP),
    "fsdp2-1d2": Family(4, _tensor("1d", 2), FSDP),
    "fsdp2-pp2": Family(4, _pipeline("1f1b"), FSDP),
    "zero1-2": Family(2, plugin=ZERO1),
    "zero2-4": Family(4, plugin=ZERO2),
    "zero1-2-1d2": Family(4, _tensor("1d", 2), ZERO1),
    "zero1-2-pp2": Family(4, _pipeline("1f1b"), ZERO1),
    "gemini-2": Family(2, plugin=GEMINI),
    "gemini-2-1d2": Family(4, _tensor("1d", 2), GEMINI),
    "1d-2": Family(2, _tensor("1d", 2)),
    "1d-4": Family(4, _tensor("1d", 4)),
    "2d-4": Family(4, _tensor("2d", 4)),
    "2.5d-8": Family(8, _tensor("2.5d", 8, depth=2)),
    "3d-8": Family(8, _tensor("3d", 8)),
    "ddp2-1d2": Family(4, _tensor("1d", 2), DDP),
    "gpipe": Family(2, _pipeline("gpipe")),
    "1f1b": Family(3, _pipeline("1f1b", 3)),
    "interleaved": Family(2, _pipeline("interleaved"), chunks=2),
    "zb-h1": Family(2, _pipeline("zbh1")),
    "zb-v": Family(2, _pipeline("zbv"), chunks=2),
    "dp2-pp2": Family(4, _pipeline("1f1b")),
    "pp2-1d2": Family(4, _pipeline("1f1b") | _tensor("1d", 2)),
    "dp2-pp2-1d2": Family(8, _pipeline("interleaved") | _tensor("1d", 2), chunks=2),
    "pp2-2d4": Family(8, _pipeline("gpipe") | _tensor("2d", 4)),
}


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Embedding(VOCABULARY, HIDDEN), *(Block() for _ in range(4)), nn.Linear(HIDDEN, VOCABULARY)]
    return nn.Sequential(OrderedDict((f"part{i}", layer) for i, layer in enumerate(layers)))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (2, BATCH, 3), generator=generator) for _ in range(steps)]
    return [(x, y) for x, y in ids]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups; the second with another rate."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-2}],
        lr=1e-2,
        eps=1e-4,
    )


class Job:
    """The model in training under the launched family."""

    def __init__(self, family: Family, seed: int = 0, **booster: Any) -> None:
        self.family = family
        model: nn.Module = build(seed)
        if family.stages > 1 or "tensor" in family.parallel:
            shape = Shape.VEE if family.parallel.get("pipeline", {}).get("schedule") == "zbv" else Shape.LOOP
            stages = cut(model, Placement(family.stages, family.chunks, shape), _rank(ParallelMode.PIPELINE))  # type: ignore[arg-type]
            if "tensor" in family.parallel:
                named = [
                    [(name, to_tensor_parallel(part)) for name, part in stage.named_children()]
                    for stage in stages
                ]
                stages = [nn.Sequential(OrderedDict(parts)) for parts in named]
            model = stages[0] if family.chunks == 1 else nn.ModuleList(stages)
        self.booster = Booster("cpu", plugin=family.plugin and family.plugin(), **booster)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        criterion = col_nn.CrossEntropyLoss() if "tensor" in family.parallel else Loss()
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(
            model, optimizer, criterion, None, scheduler
        )

    def train(self, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        return [self._step(batch) for batch in data]

    def _step(self, batch: tuple[Tensor, Tensor]) -> float:
        replicas = gpc.data_parallel_size if gpc.is_initialized(ParallelMode.DATA) else 1
        own = _part(batch, _rank(ParallelMode.DATA), replicas)
        if self.family.stages > 1:
            loss = self.booster.execute_pipeline(iter([own]), self.model, self.criterion, self.optimizer)[
                "loss"
            ]
        else:
            x, y = partition_batch(own)
            loss = self.criterion(self.model(x), y)
            self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return _mean(loss)


class Loss(nn.Module):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _rank(mode: ParallelMode) -> int:
    return gpc.get_local_rank(mode) if gpc.is_initialized(mode) else 0


def _mean(loss: Tensor | None) -> float:
    """Over the ranks that have a loss."""
    if not dist.is_initialized():
        assert loss is not None
        return float(loss.detach())
    total = (
        torch.tensor([0.0, 0.0])
        if loss is None
        else torch.stack([loss.detach().float().reshape(()), torch.ones(())])
    )
    dist.all_reduce(total)
    return float(total[0] / total[1])


def start(family: Family) -> None:
    launch({"parallel": family.parallel, "NUM_MICRO_BATCHES": 2, "NUM_CHUNKS": family.chunks})


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of models and optimizers in a checkpoint, whole."""
    manifest = read_manifest(folder)
    reader = RunReader(folder, manifest)
    for name, stored in manifest.tensors.items():
        if not name.startswith("random/"):
            yield name, reader.whole(stored)
