"""GPT under a plan equals the serial GPT: loss, gradients and weights after training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.testing import parameterize, spawn
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import Problem, check_plan
from titans.model.gpt import GPT, GPTLMLoss


def problem(checkpoint: bool) -> Problem:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(
            32, 8, 16, 2, 2, dropout=0, embedding_dropout=0, attention_dropout=0, checkpoint=checkpoint
        )

    def loss(model: nn.Module, input_ids: Tensor) -> Tensor:
        return GPTLMLoss()(model(input_ids), input_ids)

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(3)]
    return Problem(build=build, batches=batches, loss=loss)


@parameterize("checkpoint", [False, True])
def check(checkpoint: bool) -> None:
    check_plan(problem(checkpoint), lambda p: BoosterRun(p, Booster(device="cpu", plugin=TorchDDPPlugin())))


def run(rank: int, world_size: int, port: int) -> None:
    colossalai.launch_from_torch(config={}, backend="gloo", verbose=False)
    check()


def test_data_parallel_gpt_equals_the_serial_one() -> None:
    spawn(run, 2)
