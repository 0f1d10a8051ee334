"""An engine under data parallelism equals serial training, however its gradients are synchronized."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from colossalai.engine.gradient_handler import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER
from colossalai.testing import RankError, spawn
from colossalai.testing.parity import ParityError, Problem, check_plan
from tests.engine.plans import Config, EngineRun, data, launch, mlp, sgd


def clipping_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    optimizer = sgd(params)

    def clip(*_: Any) -> None:
        clip_grad_norm_(params, 0.05)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class Branches(nn.Module):
    """Each sample goes left or right, so that a rank may not use one side at all; one part is used by
    nobody.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = mlp()
        self.left, self.right, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = zip(x[:, 0] > 0, self.body(x), strict=True)
        return torch.stack([self.left(y) if positive else self.right(y) for positive, y in rows])


def problem(build: Any = mlp, optimizer: Any = sgd) -> Problem:
    sizes = (16, 16, 8)
    all_data = [data(n, seed) for seed, n in enumerate(sizes)]
    return Problem(
        build=build,
        batches=[d.tensors for d in all_data],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=optimizer,
    )


HANDLER: Config = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}


@dataclass
class Case:
    config: Config = field(default_factory=dict)
    serial_optimizer: Any = sgd
    build: Any = mlp


CASES = {
    "DDP": Case(),
    "handler": Case(HANDLER),
    "handlers, the other name": Case({"gradient_handlers": HANDLER["gradient_handler"]}),
    "DDP, accumulation": Case({"gradient_accumulation": 2}),
    "handler, accumulation": Case({**HANDLER, "gradient_accumulation": 2}),
    "DDP, clipping": Case({"clip_grad_norm": 0.05}, clipping_sgd),
    "handler, clipping, accumulation": Case(
        {**HANDLER, "clip_grad_norm": 0.05, "gradient_accumulation": 2}, clipping_sgd
    ),
    "a part that is not used": Case(HANDLER, build=Branches),
    "DDP options": Case({"torch_ddp": {"find_unused_parameters": True}}, build=Branches),
}


def check_cases(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    for name, case in CASES.items():
        try:
            check_plan(
                problem(case.build, case.serial_optimizer),
                lambda p, c=case: EngineRun(p, c.config, sgd),  # type: ignore[misc]
            )
        except ParityError as error:
            raise ParityError(f"{name}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_engine_equals_serial_training(world_size: int) -> None:
    spawn(check_cases, world_size)


@GRADIENT_HANDLER.register_module
class ForgetfulHandler(BaseGradientHandler):
    def handle_gradient(self) -> None:
        pass


def check_forgetful(rank: int, world_size: int, port: int) -> None:
    launch(port, {}, rank, world_size)
    config = {"gradient_handler": [{"type": "ForgetfulHandler"}]}
    check_plan(problem(), lambda p: EngineRun(p, config))


def test_a_handler_that_does_nothing_is_found_out() -> None:
    with pytest.raises(RankError, match=r"gradient at step 0 of .* differs from the serial"):
        spawn(check_forgetful, 2)
