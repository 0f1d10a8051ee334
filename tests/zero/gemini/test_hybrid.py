"""Gemini through the config: engines, tensor parallelism, pipelines."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.pipeline.stage import Shape
from colossalai.testing import parametrize_sample
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from tests.engine.plans import EngineRun
from tests.pipeline.plans import config, launch, problem, to_tensor_parallel, token_problem
from tests.zero.low_level.test_hybrid import averaged, small_problem

TINY = 128 / 1024**2
SMALL = {"min_chunk_size_mb": TINY, "search_range_mb": TINY, "precision": "fp32"}


def section(policy: str = "cpu", **options: Any) -> dict[str, Any]:
    return {"model_config": {"tensor_placement_policy": policy, **SMALL}, "optimizer_config": options}


def whole_weights(model: GeminiDDP) -> dict[str, Tensor]:
    return dict(model.whole_values())  # type: ignore[arg-type]


def gemini_gradients(optimizer: GeminiOptimizer) -> dict[Tensor, Tensor]:
    optimizer.give_gradients(everywhere=True)
    return averaged(optimizer)


class GeminiEngineRun(EngineRun):
    def weights(self) -> dict[str, Tensor]:
        return whole_weights(self.engine.model)  # type: ignore[arg-type]

    def gradients(self) -> dict[str, Tensor]:
        names = {p: n for n, p in self.engine.model.named_parameters()}
        return {names[p]: grad for p, grad in gemini_gradients(_own(self.engine.optimizer)).items()}


def _own(optimizer: Any) -> GeminiOptimizer:
    while not isinstance(optimizer, GeminiOptimizer):
        optimizer = optimizer.optim
    return optimizer


def engine_plan(task: Problem, settings: dict[str, Any]) -> EngineRun:
    launch(settings)
    return GeminiEngineRun(task, settings)


@parametrize_sample("policy, accumulate", list(itertools.product(("cpu", "cuda", "auto"), (1, 2))), n=2)
def test_in_an_engine(policy: str, accumulate: int) -> None:
    settings = {"zero": section(policy), "gradient_accumulation": accumulate}
    assert_equal_to_serial(small_problem, partial(engine_plan, settings=settings), 2)


class GeminiPipelineRun(PipelineRun):
    def weights(self) -> dict[str, Tensor]:
        model = self.engine.model
        assert isinstance(model, GeminiDDP)
        values = whole_weights(model)
        names = {p: n for n, p in model.unwrap().named_parameters()}
        return self._everywhere((own, self._whole(values[names[p]], p)) for p, own in self.names.items())

    def gradients(self) -> dict[str, Tensor]:
        grads = gemini_gradients(_own(self.engine.optimizer))
        return self._everywhere((self.names[p], self._whole(grad, p)) for p, grad in grads.items())

    def gradient_norm(self) -> Tensor:
        return self.engine.optimizer.clip_grad_by_norm(float("inf"))


def staged(task: Problem, schedule: str, chunks: int, policy: str, mode: str | None) -> PipelineRun:
    settings = config(schedule, 2, 4, chunks, zero=section(policy))
    if mode:
        settings["parallel"]["tensor"] = {"mode": mode, "size": 2}
    launch(settings)
    return GeminiPipelineRun(
        task,
        col_nn.CrossEntropyLoss() if mode else nn.CrossEntropyLoss(),
        chunks=chunks,
        shape=Shape.VEE if schedule == "zbv" else Shape.LOOP,
        convert=to_tensor_parallel if mode else None,
    )


SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))


@parametrize_sample("schedule, policy", list(itertools.product(SCHEDULES, ("cpu", "cuda"))), n=3)
def test_in_a_pipeline(schedule: tuple[str, int], policy: str) -> None:
    name, chunks = schedule
    run = partial(staged, schedule=name, chunks=chunks, policy=policy, mode=None)
    assert_equal_to_serial(problem, run, 4)


def test_in_a_pipeline_of_tensor_parallel_stages() -> None:
    run = partial(staged, schedule="1f1b", chunks=1, policy="cpu", mode="1d")
    assert_equal_to_serial(token_problem, run, 8)
