"""Clipping under tensor parallelism: the norm is that of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from colossalai.core import global_context as gpc
from colossalai.engine.gradient_accumulation import GradAccumOptimizer
from colossalai.mesh import Layout, parameter, unshard
from colossalai.testing import assert_close, spawn
from tests.engine.plans import initialize, launch, on_device

CUT = Layout((("tp",), ()))
WEIGHT = torch.arange(12.0).view(4, 3) / 10


class CutLinear(nn.Module):
    """A linear layer whose outputs are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(nn.Parameter(WEIGHT), CUT, gpc.mesh)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def check_clipping(rank: int, world_size: int, port: int) -> None:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "clip_grad_norm": 0.5}
    launch(port, config, rank, world_size)
    for extra in ({}, {"gradient_accumulation": 2}):
        model = CutLinear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = initialize({**config, **extra}, model=model, optimizer=optimizer, criterion=None)
        assert isinstance(engine.optimizer, GradAccumOptimizer) == bool(extra)
        for _ in range(1 + len(extra)):
            engine.zero_grad()
            engine.backward((engine(*on_device(torch.ones(2, 3))) ** 2).sum())
            engine.step()
        serial = WEIGHT.clone().requires_grad_()
        ((torch.ones(2, 3) @ serial.t()) ** 2).sum().backward()
        assert serial.grad is not None
        nn.utils.clip_grad_norm_([serial], 0.5)
        whole = unshard(model.weight.detach(), CUT, gpc.mesh, (4, 3))
        assert_close(whole.cpu(), WEIGHT - serial.grad, rtol=1e-5, atol=1e-6)
    model.weight.grad = torch.full_like(model.weight, float("inf"))
    with pytest.raises(RuntimeError, match="norm of all gradients is inf"):
        engine.optimizer.optim.clip_grad_by_norm(1.0, error_if_nonfinite=True)


def test_clipping_counts_the_pieces_of_other_ranks() -> None:
    spawn(check_clipping, 2)
