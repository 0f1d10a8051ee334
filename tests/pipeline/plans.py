"""What the tests of the pipeline share: small problems, and plans for the parity check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.pipeline.stage import Shape
from colossalai.testing.parity import Problem
from colossalai.testing.pipelined import PipelineRun

HIDDEN, CLASSES, STEPS = 8, 4, 5


def build() -> nn.Module:
    torch.manual_seed(0)
    body: list[nn.Module] = [nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU()]
    for _ in range(3):
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


def config(schedule: str, stages: int, microbatches: int, chunks: int = 1, **others: Any) -> dict[str, Any]:
    parallel = {"pipeline": {"size": stages, "schedule": schedule}}
    return {"parallel": parallel, "NUM_MICRO_BATCHES": microbatches, "NUM_CHUNKS": chunks, **others}


def launch(config: dict[str, Any]) -> None:
    colossalai.launch_from_torch(config=config, backend="gloo", verbose=False)


def plan(task: Problem, schedule: str, stages: int, microbatches: int, chunks: int = 1) -> PipelineRun:
    launch(config(schedule, stages, microbatches, chunks))
    shape = Shape.VEE if schedule == "zbv" else Shape.LOOP
    return PipelineRun(task, nn.CrossEntropyLoss(), chunks=chunks, shape=shape)
