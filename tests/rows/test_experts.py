"""Experts that ranks with different tokens share out: every gradient equals that of the serial model, through
DDP, handlers and pipelines.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.pipeline.stage import Placement, Shape
from colossalai.testing import spawn
from colossalai.testing.boosted import _part as part_of
from colossalai.testing.parity import Problem, SerialRun, assert_equal_to_serial
from colossalai.testing.pipelined import PipelineRun, cut
from colossalai.utils.dataloader import data_parallel_place
from tests.rows.plans import (
    CLIP,
    PLUGINS,
    SMALL,
    ClippedSerial,
    CutRun,
    close,
    close_weights,
    differing,
    experts_problem,
    launch,
    saved_weights,
    to_plan,
    token_loss,
)

EP2: dict[str, Any] = {"moe": {"size": 2}}
HANDLER = [{"type": "DataParallelGradientHandler"}]
PIPED = {**EP2, "pipeline": 2, "NUM_MICRO_BATCHES": 2}
FEWER = (4, 2, 1)  # experts of layers: fewer than ranks, and fewer still


def ddp(task: Problem, accumulate: int = 1, **plan: Any) -> CutRun:
    launch(**plan)
    return CutRun(task, TorchDDPPlugin(), accumulate=accumulate)


@pytest.mark.parametrize(
    ("plan", "ranks", "options", "accumulate"),
    [
        pytest.param(EP2, 2, {"open_": 0}, 1, id="no-rank-has-tokens"),
        pytest.param(EP2, 4, {}, 2, id="dp2-accumulated"),
        pytest.param({"moe": {"size": 4}}, 4, {"experts": FEWER}, 1, id="fewer-than-ranks"),
        pytest.param(EP2, 4, {"open_": 2}, 1, id="ranks-without-tokens"),
        pytest.param({**EP2, "sequence": 2}, 4, {}, 1, id="sp2"),
        pytest.param({**EP2, "tensor": {"size": 2, "mode": "1d"}}, 4, {}, 1, id="tp2"),
        pytest.param({"moe": {"size": 4}}, 8, {"experts": FEWER}, 1, id="ep4-dp2", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_under_ddp(
    plan: dict[str, Any], ranks: int, options: dict[str, Any], accumulate: int
) -> None:
    make = partial(experts_problem, **options)
    assert_equal_to_serial(make, partial(ddp, accumulate=accumulate, **plan), ranks)


class EveryPass(CutRun):
    """A run whose backward passes all average: the second adds to what is a mean already."""

    def forward_backward(self, batch: Any) -> Tensor:
        own = part_of(batch, self.rank, self.replicas)
        for i in range(2):
            self.booster.backward(self.problem.loss(self.model, part_of(own, i, 2)) / 2, self.optimizer)
        return SerialRun(self.problem).forward_backward(batch)  # the loss is not what is looked at


def every_pass(task: Problem) -> CutRun:
    launch(**EP2)
    return EveryPass(Problem(build=task.build, batches=task.batches[:1], loss=task.loss), TorchDDPPlugin())


def one_batch() -> Problem:
    task = experts_problem()
    return Problem(build=task.build, batches=task.batches[:1], loss=task.loss)


def test_passes_that_all_average() -> None:
    assert_equal_to_serial(one_batch, every_pass, 4)


def engine(task: Problem, **plan: Any) -> PipelineRun:
    launch(**plan)
    return PipelineRun(task, token_loss, convert=differing)


@pytest.mark.parametrize(
    ("plan", "ranks", "options"),
    [
        pytest.param(EP2, 2, {}, id="ddp"),
        pytest.param({**EP2, "gradient_handler": HANDLER}, 4, {"open_": 2}, id="handler"),
        pytest.param(PIPED, 4, {"open_": 2}, id="pp2"),
        pytest.param({**PIPED, "sequence": 2}, 8, {}, id="pp2-sp2", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_of_an_engine(plan: dict[str, Any], ranks: int, options: dict[str, Any]) -> None:
    assert_equal_to_serial(partial(experts_problem, **options), partial(engine, **plan), ranks)


SECTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"clip_grad_norm": CLIP},
    "handler": {"gradient_handler": HANDLER, "clip_grad_norm": CLIP},
    "zero2": {"zero": {"level": 2, "precision": "fp32", "clip_grad": CLIP}},
    "zero3": {"zero": {"level": 3, "precision": "fp32", "pin_memory": False, "clip_grad": CLIP, **SMALL}},
}


def check_section(rank: int, world_size: int, port: int, folder: str, section: dict[str, Any]) -> None:
    launch(**EP2, **section)
    task = experts_problem()
    model = task.build()
    for i, module in enumerate(model):  # type: ignore[arg-type]
        model[i] = differing(module)  # type: ignore[operator]
    made, *_ = colossalai.initialize(model, task.optimizer(model.parameters()), token_loss, verbose=False)
    made.train()
    serial = ClippedSerial(task)
    place = data_parallel_place()
    for batch in task.batches:
        data, labels = part_of(batch, *place)
        made.zero_grad()
        loss = made.criterion(made(data), labels)
        made.backward(loss)
        made.step()
        serial.forward_backward(batch)
        serial.update()
    assert made.booster is not None
    close_weights(saved_weights(made.booster, made.model, folder), serial)


SAMPLE = (("zero2", 4), ("zero3", 2), ("handler", 2))


@pytest.mark.parametrize(
    ("section", "ranks"),
    [
        pytest.param(section, ranks, marks=() if (section, ranks) in SAMPLE else pytest.mark.slow)
        for section in SECTIONS
        for ranks in (2, 4)
    ],
)
def test_sections_of_a_config(section: str, ranks: int, tmp_path: Path) -> None:
    spawn(check_section, ranks, folder=str(tmp_path), section=SECTIONS[section])


def check_booster(rank: int, world_size: int, port: int, folder: str) -> None:
    launch(**PIPED)
    for plugin in (None, *(name for name in PLUGINS if name != "fsdp")):
        task = experts_problem(open_=2)
        serial = ClippedSerial(task)
        place = Placement(gpc.pipeline_parallel_size, 1, Shape.LOOP)
        (stage,) = cut(task.build(), place, gpc.mesh.coord["pp"])  # type: ignore[arg-type]
        change = differing if plugin is not None else to_plan  # alone, a booster brings no weights to others
        stage = nn.Sequential(OrderedDict((n, change(m)) for n, m in stage.named_children()))
        booster = Booster(device="cpu", plugin=None if plugin is None else PLUGINS[plugin]())
        model, optimizer, *_ = booster.boost(stage, task.optimizer(stage.parameters()))
        for batch in task.batches:
            serial.forward_backward(batch)
            own = part_of(batch, *data_parallel_place())
            for i in range(2):  # two pipelines for a step: what is averaged stays as it is
                part = part_of(own, i, 2)
                booster.execute_pipeline(iter([part]), model, lambda *pair: token_loss(*pair) / 2, optimizer)
            norm = optimizer.clip_grad_by_norm(CLIP)
            close(norm, serial.gradient_norm(), f"norm under {plugin}")
            serial.update()
            optimizer.step()
            optimizer.zero_grad()
        close_weights(saved_weights(booster, model, folder), serial)


def test_a_booster_with_a_pipeline(tmp_path: Path) -> None:
    spawn(check_booster, 4, folder=str(tmp_path))


def check_overflow(rank: int, world_size: int, port: int) -> None:
    launch(**EP2)
    for precision in ("fp16", "fp16_naive"):
        model = to_plan(experts_problem().build()[2])  # type: ignore[index]
        booster = Booster(device="cpu", plugin=TorchDDPPlugin(), mixed_precision=precision)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = [p.detach().clone() for p in model.parameters()]
        booster.backward(model(torch.ones(2, 3, 8)).float().sum(), optimizer)
        for p in model.parameters():
            if p.grad is not None and p.dim() == 3 and rank == 1:
                p.grad.fill_(float("inf"))
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters())), "all ranks skip the step"


def test_an_overflow_of_one_rank_is_that_of_all() -> None:
    spawn(check_overflow, 2)
