"""The models of the zoo, under the plans of the library, equal themselves trained serially."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.testing import spawn
from colossalai.testing.boosted import BoosterRun
from colossalai.testing.parity import Problem, check_plan
from titans.model.gpt import GPT, GPTLMLoss
from titans.model.resnet import BasicBlock, ResNet
from titans.model.vit import VisionTransformer


def gpt() -> nn.Module:
    sizes = {"vocab_size": 37, "max_position_embeddings": 8, "hidden_size": 12, "num_heads": 3, "depth": 2}
    return GPT(**sizes, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0, checkpoint=True)


def vit() -> nn.Module:
    return VisionTransformer(8, 4, hidden_size=12, num_heads=3, depth=2, num_classes=5, dropout=0.0)


def resnet() -> nn.Module:
    # with the statistics of the batch, every rank would compute something else
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=5, small_images=True).eval()


def classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def words(model: nn.Module, batch: Tensor) -> Tensor:
    return GPTLMLoss()(model(batch), batch)


def problem(build: Callable[[], nn.Module]) -> Problem:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    torch.manual_seed(1)
    batches: list[Any]
    if build is gpt:
        batches = [torch.randint(37, (4, 8)) for _ in range(2)]
        return Problem(build=seeded, batches=batches, loss=words)
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(2)]
    return Problem(build=seeded, batches=batches, loss=classes)


def _check(rank: int, world_size: int, port: int) -> None:
    colossalai.launch({}, rank, world_size, "127.0.0.1", port, backend="gloo", verbose=False)
    for build in (gpt, vit, resnet):
        check_plan(problem(build), lambda p: BoosterRun(p, Booster("cpu", plugin=TorchFSDPPlugin())))
    for build in (vit, resnet):  # GPT's turn is in test_gpt_parity
        check_plan(problem(build), lambda p: BoosterRun(p, Booster("cpu", plugin=TorchDDPPlugin())))


def test_models_equal_themselves_trained_serially() -> None:
    spawn(_check, 2)
