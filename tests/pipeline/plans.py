"""What the tests of the pipeline share: small problems, and plans for the parity check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.core import global_context as gpc
from colossalai.nn.modes import current
from colossalai.pipeline.stage import Shape
from colossalai.testing.parity import Problem
from colossalai.testing.pipelined import PipelineRun

HIDDEN, CLASSES, STEPS = 8, 4, 3
MakePlugin = Callable[[], Plugin]


def build() -> nn.Module:
    torch.manual_seed(0)
    body: list[nn.Module] = [nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()]
    for _ in range(5):
        body += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
    return nn.Sequential(*body, nn.Linear(HIDDEN, CLASSES))


def problem(batch: int = 16) -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(batch, HIDDEN, generator=generator),
            torch.randint(CLASSES, (batch,), generator=generator),
        )
        for _ in range(STEPS)
    ]

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    return Problem(build=build, batches=batches, loss=loss)


class Block(nn.Module):
    """Two linear layers, which a tensor-parallel mode cuts along the features between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_tokens() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, HIDDEN), *(Block() for _ in range(7)), nn.Linear(HIDDEN, 16))


def token_problem(batch: int = 16) -> Problem:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(16, (2, batch, 3), generator=generator) for _ in range(STEPS)]

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())

    return Problem(build=build_tokens, batches=[(x, y) for x, y in ids], loss=loss)


def to_tensor_parallel(module: nn.Module) -> nn.Module:
    """A layer of ``build_tokens`` in the mode of the launched job."""
    where: dict[str, Any] = {"tp": current().tp, "mesh": gpc.mesh}
    if isinstance(module, nn.Embedding):
        return col_nn.Embedding.from_native(module, **where)
    if isinstance(module, nn.Linear):
        return col_nn.Classifier.from_native(module, **where)
    assert isinstance(module, Block)
    module.norm = col_nn.LayerNorm.from_native(module.norm, **where)
    module.up = col_nn.Linear.from_native(module.up, "expand", **where)
    module.down = col_nn.Linear.from_native(module.down, "contract", **where)
    return module


def tensor_plan(
    task: Problem,
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int,
    mode: str,
    size: int,
    plugin: MakePlugin | None = None,
) -> PipelineRun:
    settings = config(schedule, stages, microbatches, chunks)
    settings["parallel"]["tensor"] = {"mode": mode, "size": size}
    launch(settings)
    shape = Shape.VEE if schedule == "zbv" else Shape.LOOP
    loss = col_nn.CrossEntropyLoss()
    return PipelineRun(
        task, loss, chunks=chunks, shape=shape, convert=to_tensor_parallel, booster=_booster(plugin)
    )


def config(schedule: str, stages: int, microbatches: int, chunks: int = 1, **others: Any) -> dict[str, Any]:
    parallel = {"pipeline": {"size": stages, "schedule": schedule}}
    settings = {"parallel": parallel, "NUM_MICRO_BATCHES": microbatches, "NUM_CHUNKS": chunks}
    return settings | others


def launch(config: dict[str, Any]) -> None:
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)


def plan(
    task: Problem,
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    plugin: MakePlugin | None = None,
) -> PipelineRun:
    """Without a ``plugin`` by an engine, else by a booster."""
    launch(config(schedule, stages, microbatches, chunks))
    shape = Shape.VEE if schedule == "zbv" else Shape.LOOP
    return PipelineRun(task, _mean_loss, chunks=chunks, shape=shape, booster=_booster(plugin))


def _mean_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Of classes, or of tokens."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def _booster(plugin: MakePlugin | None) -> Booster | None:
    return None if plugin is None else Booster("cpu", plugin=plugin())
