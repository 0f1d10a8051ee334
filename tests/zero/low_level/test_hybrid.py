"""ZeRO through the config, and together with tensor parallelism and pipelines."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.context.config import ConfigException
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import ZeROGradientHandler
from colossalai.mesh.collectives import count_communication
from colossalai.pipeline.stage import Shape
from colossalai.testing import parametrize_sample, spawn
from colossalai.testing.parity import Problem, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun
from colossalai.zero import LowLevelZeroOptimizer
from colossalai.zero.states import sliced_states
from tests.engine.plans import EngineRun, initialize, mlp, sgd
from tests.engine.plans import launch as launch_engine
from tests.pipeline.plans import config, launch, problem, to_tensor_parallel, token_problem


def averaged(optimizer: Any) -> dict[Tensor, Tensor]:
    """The averaged gradients by parameter; with tensor parallelism this rank's pieces of them."""
    optimizer.unscale_grad()
    found = sliced_states(
        optimizer._numbered,
        lambda piece: {} if piece.value.grad is None else {"grad": piece.value.grad},
        optimizer.group,
    )
    whole = {
        n: s["grad"].full_tensor() if hasattr(s["grad"], "full_tensor") else s["grad"]
        for n, s in found.items()
    }
    return {optimizer._numbered[n].param: grad for n, grad in whole.items()}


class ZeroPipelineRun(PipelineRun):
    def gradients(self) -> dict[str, Tensor]:
        grads = averaged(self.engine.optimizer)
        return self._everywhere((self.names[p], self._whole(grad, p)) for p, grad in grads.items())

    def gradient_norm(self) -> Tensor:
        return self.engine.optimizer.clip_grad_by_norm(float("inf"))


def staged(task: Problem, schedule: str, chunks: int, level: int, mode: str | None) -> PipelineRun:
    settings = config(schedule, 2, 4, chunks, zero={"level": level, "precision": "fp32"})
    if mode:
        settings["parallel"]["tensor"] = {"mode": mode, "size": 2}
    launch(settings)
    shape = Shape.VEE if schedule == "zbv" else Shape.LOOP
    run = ZeroPipelineRun(
        task,
        col_nn.CrossEntropyLoss() if mode else nn.CrossEntropyLoss(),
        chunks=chunks,
        shape=shape,
        convert=to_tensor_parallel if mode else None,
    )
    optimizer = run.engine.optimizer
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    own = sum(piece.value.numel() for piece in optimizer.pieces)
    held = sum(p.numel() for p in run.names)
    assert own <= held / 2 + 4 * len(optimizer.pieces)  # two data-parallel ranks share the states of a stage
    return run


SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))


@parametrize_sample("schedule, level", list(itertools.product(SCHEDULES, (1, 2))), n=3)
def test_in_a_pipeline(schedule: tuple[str, int], level: int) -> None:
    name, chunks = schedule
    run = partial(staged, schedule=name, chunks=chunks, level=level, mode=None)
    assert_equal_to_serial(problem, run, 4)


@parametrize_sample("level", [1, 2], n=1)
def test_in_a_pipeline_of_tensor_parallel_stages(level: int) -> None:
    run = partial(staged, schedule="1f1b", chunks=1, level=level, mode="1d")
    assert_equal_to_serial(token_problem, run, 8)


class TensorRun:
    """The token model under a tensor mode and ZeRO over the data-parallel ranks, through a booster."""

    def __init__(self, task: Problem, mode: str, size: int, stage: int) -> None:
        launch({"parallel": {"tensor": {"mode": mode, "size": size}}})
        serial = task.build()
        layers = [to_tensor_parallel(layer) for layer in serial]  # type: ignore[attr-defined]
        model = nn.Sequential(*layers)
        self.booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
        self.model, self.optimizer, *_ = self.booster.boost(model, task.optimizer(model.parameters()))
        self.names = {p: n for n, p in self.model.named_parameters()}
        self.criterion = col_nn.CrossEntropyLoss()

    def _whole(self, tensor: Tensor, param: Tensor) -> Tensor:
        return PipelineRun._whole(self, tensor, param)  # type: ignore[arg-type]

    def weights(self) -> dict[str, Tensor]:
        return {name: self._whole(p, p) for p, name in self.names.items()}

    def forward_backward(self, batch: Any) -> Tensor:
        x, y = (t.chunk(gpc.data_parallel_size)[gpc.mesh.coord["dp"]] for t in batch)
        loss = self.criterion(self.model(x), y)
        self.booster.backward(loss, self.optimizer)
        total = loss.detach().clone()
        dist.all_reduce(total, group=gpc.mesh.group("dp"))
        return total / gpc.data_parallel_size

    def gradients(self) -> dict[str, Tensor]:
        return {self.names[p]: self._whole(grad, p) for p, grad in averaged(self.optimizer).items()}

    def gradient_norm(self) -> Tensor:
        return self.optimizer.clip_grad_by_norm(float("inf"))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@parametrize_sample(
    "mode, size, stage, data",
    [(m, s, z, d) for m, s in (("1d", 2), ("2d", 4)) for z in (1, 2) for d in (2,)],
    n=2,
)
def test_with_tensor_parallelism(mode: str, size: int, stage: int, data: int) -> None:
    assert_equal_to_serial(token_problem, partial(TensorRun, mode=mode, size=size, stage=stage), size * data)


class ZeroEngineRun(EngineRun):
    def gradients(self) -> dict[str, Tensor]:
        names = {p: n for n, p in self.engine.model.named_parameters()}
        return {names[p]: grad for p, grad in averaged(self.engine.optimizer).items()}


def small_problem() -> Problem:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]

    def loss(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    return Problem(build=mlp, batches=batches, loss=loss)


def engine_plan(task: Problem, settings: dict[str, Any]) -> EngineRun:
    launch(settings)
    return ZeroEngineRun(task, settings)


@pytest.mark.parametrize("level", [1, 2])
def test_in_an_engine(level: int) -> None:
    settings = {
        "zero": {"level": level, "precision": "fp32", "overlap_comm": True, "cpu_offload": True},
        "gradient_accumulation": 2,
    }
    assert_equal_to_serial(small_problem, partial(engine_plan, settings=settings), 2)


def check_config(rank: int, world_size: int, port: int) -> None:
    launch_engine(port, {}, rank, world_size)
    section = {
        "level": 2,
        "dynamic_loss_scale": True,
        "overlap_comm": True,
        "clip_grad": 1.0,
        "cpu_offload": True,
    }
    engine, *_ = initialize({"zero": section})
    optimizer = engine.optimizer
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    assert optimizer.loss_scale == 2**16
    assert next(engine.model.parameters()).dtype == torch.float16
    assert optimizer._max_norm == 1.0
    fixed, *_ = initialize({"zero": {"level": 1, "dynamic_loss_scale": False, "initial_scale": 8.0}})
    assert fixed.optimizer.loss_scale == 8.0
    with pytest.raises(ConfigException, match=r"section 'zero': .* precision as one of"):
        initialize({"zero": {"level": 1, "precision": "int8"}})
    # no communication before the last pass of a group, and the handler of the documents
    plain = {"zero": {"level": 2, "precision": "fp32"}, "gradient_handler": [{"type": "ZeROGradientHandler"}]}
    engine, *_ = initialize({**plain, "gradient_accumulation": 2})
    for i in range(2):
        with count_communication() as log:
            engine.execute_schedule(iter([(torch.ones(2, 6), torch.tensor([0, 1]))]))
        assert (log.calls("reduce_scatter") > 0) == (i == 1)
        engine.step()
    with pytest.raises(TypeError, match="ZeROGradientHandler needs an optimizer of ZeRO, got SGD"):
        ZeROGradientHandler(mlp(), sgd(mlp().parameters())).handle_gradient()


def test_config() -> None:
    spawn(check_config, 2)


def check_booster_pipeline(rank: int, world_size: int, port: int) -> None:
    launch(config("1f1b", 2, 2))
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    serial = nn.Sequential(*layers)
    stage = gpc.mesh.coord["pp"]
    booster = Booster(device="cpu", plugin=LowLevelZeroPlugin(stage=1, precision="bf16"))
    own = copy.deepcopy(layers[stage])
    model, optimizer, criterion, *_ = booster.boost(
        own, torch.optim.SGD(own.parameters(), lr=0.5), nn.MSELoss()
    )
    x = torch.linspace(-1, 1, 32).view(8, 4)
    dp = gpc.mesh.coord["dp"]
    part = x.chunk(2)[dp], torch.ones(4, 2)
    booster.execute_pipeline(iter([part]), model, criterion, optimizer)
    optimizer.step()
    nn.functional.mse_loss(serial(x), torch.ones(8, 2)).backward()
    with torch.no_grad():
        for p in serial.parameters():
            p -= 0.5 * p.grad
    for a, b in zip(model.parameters(), layers[stage].parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)


def test_a_pipeline_of_the_booster_in_bf16() -> None:
    spawn(check_booster_pipeline, 4)
