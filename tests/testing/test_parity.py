"""The parity check itself: it accepts what is equal and names what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from colossalai.testing.parity import ParityError, Problem, SerialRun, check_plan


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def problem() -> Problem:
    generator = torch.Generator().manual_seed(0)
    return Problem(
        build=build,
        batches=[torch.randn(6, 4, generator=generator) for _ in range(3)],
        loss=lambda model, batch: model(batch).square().mean(),
    )


class TwiceTheGradient(SerialRun):
    def forward_backward(self, batch: Tensor) -> Tensor:
        loss = super().forward_backward(batch)
        self.model[2].bias.grad *= 2
        return loss


class OtherLoss(SerialRun):
    def forward_backward(self, batch: Tensor) -> Tensor:
        return super().forward_backward(batch) * 1.001


class OtherStart(SerialRun):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        with torch.no_grad():
            self.model[0].weight[0, 0] += 1e-6


class WrongNorm(SerialRun):
    def gradient_norm(self) -> Tensor:
        return super().gradient_norm() * 2**0.5


class SkipsTheUpdate(SerialRun):
    def update(self) -> None:
        self.optimizer.zero_grad()


class ForgetsAParameter(SerialRun):
    def weights(self) -> dict[str, Tensor]:
        return {n: w for n, w in super().weights().items() if n != "0.bias"}


class NotANumber(SerialRun):
    def forward_backward(self, batch: Tensor) -> Tensor:
        return super().forward_backward(batch) * float("nan")


def test_equal_runs_pass() -> None:
    check_plan(problem(), SerialRun)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TwiceTheGradient, r"gradient at step 0 of '2.bias' differs .* allowed 1e-04"),
        (OtherLoss, "loss at step 0 differs"),
        (
            OtherStart,
            "initial weight '0.weight' is not bit-equal to the serial model's: 1 of 32 elements differ",
        ),
        (WrongNorm, "norm of all gradients at step 0 differs"),
        (SkipsTheUpdate, "loss at step 1 differs"),
        (ForgetsAParameter, r"the plan lacks \['0.bias'\] and has nothing in addition"),
        (NotANumber, "loss at step 0 differs"),
    ],
)
def test_a_wrong_run_is_named(plan: Callable[[Problem], SerialRun], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        check_plan(problem(), plan)
