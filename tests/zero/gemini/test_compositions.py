"""Gemini together with tensor parallelism and pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.nn.optimizer import HybridAdam
from colossalai.pipeline.stage import Shape
from colossalai.testing import RankError, parametrize_sample, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun
from colossalai.zero.gemini import GeminiDDP, GeminiOptimizer
from tests.pipeline.plans import config, launch, problem, to_tensor_parallel, token_problem
from tests.tensor.gpt2 import ColoRun, page_42
from tests.tensor.gpt2 import problem as colo_problem
from tests.zero.low_level.test_hybrid import TensorRun, averaged

TINY = 64 / 1024**2  # chunks of some dozen elements


def plugin(policy: str, **options: Any) -> GeminiPlugin:
    return GeminiPlugin(
        "cpu", policy, precision="fp32", min_chunk_size_mb=TINY, search_range_mb=TINY, **options
    )


def given(optimizer: Any) -> dict[Tensor, Tensor]:
    optimizer.give_gradients(everywhere=True)
    return averaged(optimizer)


class GeminiTensorRun(TensorRun):
    """The token model under a tensor mode, and Gemini over the data-parallel ranks."""

    def __init__(self, task: Problem, mode: str, size: int, policy: str) -> None:
        launch({"parallel": {"tensor": {"mode": mode, "size": size}}})
        layers = task.build()  # type: ignore[attr-defined]
        model = nn.Sequential(*map(to_tensor_parallel, layers))
        self.booster = Booster(device="cpu", plugin=plugin(policy))
        self.model, self.optimizer, *_ = self.booster.boost(model, task.optimizer(model.parameters()))
        self.names = {p: n for n, p in self.model.named_parameters()}
        self.criterion = col_nn.CrossEntropyLoss()

    def weights(self) -> dict[str, Tensor]:
        with self.model.whole_parameters():
            return super().weights()

    def gradients(self) -> dict[str, Tensor]:
        return {self.names[p]: self._whole(grad, p) for p, grad in given(self.optimizer).items()}


@parametrize_sample(
    "mode, size, policy", [(m, s, p) for m, s in (("1d", 2), ("2d", 4)) for p in ("cpu", "cuda", "auto")], n=2
)
def test_with_tensor_parallelism(mode: str, size: int, policy: str) -> None:
    assert_equal_to_serial(
        token_problem, partial(GeminiTensorRun, mode=mode, size=size, policy=policy), size * 2
    )


class GeminiPipelineRun(PipelineRun):
    """A stage, or several chunks of layers, in GeminiDDP, through ``Booster.execute_pipeline``."""

    def __init__(self, task: Problem, schedule: str, chunks: int, policy: str) -> None:
        launch(config(schedule, 2, 4, chunks))
        shape = Shape.VEE if schedule == "zbv" else Shape.LOOP
        booster = Booster(plugin=plugin(policy))
        super().__init__(task, nn.CrossEntropyLoss(), chunks=chunks, shape=shape, booster=booster)
        assert self.execute is not None
        self.model = self.execute.keywords["model"]  # type: ignore[attr-defined]

    def weights(self) -> dict[str, Tensor]:
        with self.model.whole_parameters():
            return super().weights()

    def gradients(self) -> dict[str, Tensor]:
        return self._everywhere((self.names[p], grad) for p, grad in given(self.optimizer).items())

    def gradient_norm(self) -> Tensor:
        norm: Tensor = self.optimizer.clip_grad_by_norm(float("inf"))
        return norm


@parametrize_sample(
    "schedule, chunks, policy, ranks",
    [
        (name, chunks, policy, ranks)
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
        for policy in ("cpu", "cuda", "auto")
        for ranks in (2, 4)
    ],
    n=3,
)
def test_in_a_pipeline(schedule: str, chunks: int, policy: str, ranks: int) -> None:
    assert_equal_to_serial(
        problem, partial(GeminiPipelineRun, schedule=schedule, chunks=chunks, policy=policy), ranks
    )


class GeminiColoRun(ColoRun):
    """Page 42: Hugging Face GPT-2 of ColoTensors, each laid out by a spec, in GeminiDDP."""

    def __init__(self, task: Problem, tp: int) -> None:
        launch({})
        colo = page_42(task, tp)
        super().__init__(task, colo.model, colo.pg)
        self.names = {p: n for n, p in self.model.named_parameters()}
        self.wrapped = GeminiDDP(
            self.model, "cpu", "cpu", dtype=torch.float32, min_chunk_size_mb=TINY, search_range_mb=TINY
        )
        self.gemini = GeminiOptimizer(task.optimizer(self.model.parameters()), self.wrapped)

    def forward_backward(self, batch: Tensor) -> Tensor:
        own = batch.chunk(self.pg.dp_world_size())[self.pg.dp_local_rank()]
        loss = self.loss(self.wrapped, own)
        self.gemini.backward(loss)
        total = loss.detach()
        dist.all_reduce(total, group=self.pg.dp_process_group())
        return total / self.pg.dp_world_size()

    def weights(self) -> dict[str, Tensor]:
        with self.wrapped.whole_parameters():
            return super().weights()

    def gradients(self) -> dict[str, Tensor]:
        return {self.names[p]: self._whole(grad, p) for p, grad in given(self.gemini).items()}

    def gradient_norm(self) -> Tensor:
        return self.gemini.clip_grad_by_norm(float("inf"))

    def update(self) -> None:
        self.gemini.step()
        self.gemini.zero_grad()


@parametrize_sample("ranks", [2, 4], n=1)
def test_with_colo_tensors(ranks: int) -> None:
    assert_equal_to_serial(colo_problem, partial(GeminiColoRun, tp=2), ranks)


def check_refusals(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 2))
    model = nn.Linear(4, 4)
    booster = Booster(device="cpu", plugin=plugin("cpu", update_in_backward=True))
    stage, optimizer, criterion, *_ = booster.boost(model, HybridAdam(model.parameters()), nn.MSELoss())
    batch = torch.ones(4, 4), torch.ones(4, 4)

    told = r"update_in_backward=True updates weights when .* once for each of 2 micro-batches"
    with pytest.raises(ValueError, match=told):
        booster.execute_pipeline(iter([batch]), stage, criterion, optimizer)


def test_early_updates_of_several_micro_batches_are_refused() -> None:
    spawn(check_refusals, 2)


@pytest.mark.parametrize("schedule", ["zbh1", "zbv"])
def test_split_backward_is_refused(schedule: str) -> None:
    with pytest.raises(RankError, match=f"the schedule '{schedule}' computes the gradients of weights after"):
        assert_equal_to_serial(
            problem,
            partial(GeminiPipelineRun, schedule=schedule, chunks=2 if schedule == "zbv" else 1, policy="cpu"),
            2,
        )


def check_speculative(rank: int, world_size: int, port: int, schedule: str) -> None:
    """Every micro-batch needs the weights again and brings a gradient: updates are rolled back in time."""
    launch(config(schedule, 2, 4))
    found, tried = [], []
    for early in (False, True):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        options = {"max_norm": 1.0, "update_in_backward": early, "undo_ratio": 1.0}
        booster = Booster(device="cpu", plugin=plugin("cpu", **options))
        stage, optimizer, criterion, *_ = booster.boost(
            model, HybridAdam(model.parameters(), lr=1e-2), nn.MSELoss()
        )
        tried.append(0)
        for step in range(6):
            draws = torch.Generator().manual_seed(step)
            batch = torch.randn(8, 4, generator=draws), torch.randn(8, 4, generator=draws)
            booster.execute_pipeline(iter([batch]), stage, criterion, optimizer)
            stage.gemini_manager.worker.wait_all()  # so that speculative updates have been made
            optimizer.step()
            optimizer.zero_grad()
            tried[-1] += [event.kind for event in stage.gemini_manager.timeline.events].count("try")
        found.append(stage.state_dict(only_rank_0=False))
    assert tried[0] == 0 < tried[1]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_speculative_updates_in_a_pipeline(schedule: str) -> None:
    spawn(check_speculative, 2, schedule=schedule)
