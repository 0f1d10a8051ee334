"""Autocast and bf16 weights: what travels is in the lower precision, and results are as near as bf16
allows.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, count_communication, shard
from colossalai.nn.modes import TensorParallel
from colossalai.testing import spawn
from tests.nn.layer.world import close, copy_to_serial, size, start, whole

BF16 = 3e-2  # of the largest element


class Block(nn.Module):
    def __init__(self, linear: type[nn.Module], norm: type[nn.Module], roles: bool, **here: object) -> None:
        super().__init__()
        up, down = ({"role": "expand"}, {"role": "contract"}) if roles else ({}, {})
        self.norm = norm(24, **here)
        self.up, self.down = linear(24, 48, **up, **here), linear(48, 24, **down, **here)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def check(tp: TensorParallel, mesh: Mesh, autocast: bool) -> None:
    layer = Block(col_nn.Linear, col_nn.LayerNorm, True, tp=tp, mesh=mesh)
    serial = Block(nn.Linear, nn.LayerNorm, False)
    copy_to_serial(layer, serial, mesh)
    x = torch.randn(8, 4, 24)
    expected = serial(x)
    expected.square().sum().backward()
    with count_communication() as full:
        layer(shard(x, tp.hidden, mesh).requires_grad_()).square().sum().backward()
    layer.zero_grad()
    if not autocast:
        layer.bfloat16()
    mine = shard(x, tp.hidden, mesh).to(torch.float32 if autocast else torch.bfloat16).requires_grad_()
    with count_communication() as log, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = layer(mine)
        got.float().square().sum().backward()
    close(got.detach(), shard(expected.detach(), tp.hidden, mesh), "output", BF16)
    theirs = dict(serial.named_parameters())
    for name, p in layer.named_parameters():
        assert p.grad.dtype == (torch.float32 if autocast else torch.bfloat16)
        close(whole(p.grad, p, mesh), theirs[name].grad, f"gradient of {name}", BF16)
    # half of it, but for the statistics and gradients of the norm
    assert 0.5 <= log.bytes() / full.bytes() < 0.6


def _check(rank: int, world_size: int, port: int, name: str) -> None:
    tp, mesh = start(rank, world_size, port, name)
    for autocast in (True, False):
        check(tp, mesh, autocast)


@pytest.mark.parametrize("name", ["1d", "1d-sequence", "2d", "3d"])
def test_bf16(name: str) -> None:
    spawn(_check, size(name), name=name)
