"""Page 07: WideNet and its layers as the page writes them, trained with the criterion of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import colossalai
from colossalai.engine.gradient_handler import MoeGradientHandler
from colossalai.mesh.parameter import full_shape
from colossalai.nn import MoeLoss
from colossalai.testing import spawn
from model_zoo.moe.util import VanillaFFN, moe_mlp_args
from tests.documents.pages import code
from tests.documents.scripts import prepare, run

SMALL = ", img_size=32, patch_size=8, hidden_size=32, num_heads=2, depth=2, num_classes=10, dropout=0.0"


def train(model: nn.Module, shape: tuple[int, ...], rank: int) -> list[float]:
    """The losses of a few steps on one batch, with the page's criterion."""
    criterion = run(code("07.criterion"), MoeLoss=MoeLoss, nn=nn)["criterion"]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    assert [type(handler) for handler in engine._gradient_handlers] == [MoeGradientHandler]
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    labels = torch.arange(shape[0]) % 10
    losses = []
    for _ in range(8):
        engine.zero_grad()
        loss = engine.criterion(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Pooled(nn.Module):
    """The page's layer between the tokens of a sample and the scores of its classes."""

    def __init__(self, ffn: nn.Module, d_model: int) -> None:
        super().__init__()
        self.ffn, self.head = ffn, nn.Linear(d_model, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head((x + self.ffn(x)).mean(1))
        return y


def check_page_07(rank: int, world_size: int, port: int, folder: Path) -> list[list[float]]:
    prepare(folder, code("07.config", ("= ...", "= 2")))
    torch.set_num_threads(1)
    colossalai.launch_from_torch("./config.py", verbose=False)
    env = run(code("07.environment"))["moe_env"]
    assert (env.model_parallel_size, env.data_parallel_size) == (2, 1)
    whole = run(code("07.model"))["model"]  # as it is written: of the size for ImageNet
    assert sum(full_shape(p).numel() for p in whole.parameters()) == 22_805_224
    assert whole.blocks[0].mlp.moe.moe_layer.experts.num_local_experts == 2
    names: dict[str, Any] = {"VanillaFFN": VanillaFFN, "moe_mlp_args": moe_mlp_args}
    names |= {"num_experts": 4, "capacity_factor": 1.2, "d_model": 16, "d_ff": 32, "drop_rate": 0.1}
    small = run(code("07.model", ("capacity_factor=1.2", f"capacity_factor=1.2{SMALL}")))["model"]
    ffn = run(code("07.layer"), **names)["ffn"]
    curves = [train(small, (10, 3, 32, 32), rank), train(Pooled(ffn, 16), (10, 5, 16), rank)]
    # ranks that drew dropout masks for different numbers of rows are still in step
    return [*curves, [float(torch.rand(()))]]


def test_page_07(tmp_path: Path) -> None:
    first, second = spawn(check_page_07, 2, folder=tmp_path)
    for curves in (first, second):
        for curve in curves[:2]:
            assert curve[-1] < curve[0] - 0.1, curve
    assert first[2] == second[2]
