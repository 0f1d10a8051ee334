"""``DTensor``: pieces that know their layout, and modules of them that train like the serial one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from colossalai.device import DeviceMesh
from colossalai.tensor.d_tensor import (
    DTensor,
    Layout,
    ShardingSpec,
    construct_default_sharding_spec,
    distribute_module,
    distribute_tensor,
)
from colossalai.tensor.sharding_spec import ShardingSpecException
from colossalai.testing import spawn
from tests.mesh.world import start


def _tensor(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    grid = DeviceMesh(torch.arange(4), (2, 2))
    whole = torch.arange(32.0).view(4, 8)
    assert str(construct_default_sharding_spec(whole)) == "RR"
    rows, columns = (
        Layout(grid, "cpu", ShardingSpec(2, sharding_sequence=s), (4, 8)) for s in ("S01R", "RS1")
    )
    x = distribute_tensor(whole, rows)
    assert type(x) is DTensor
    assert torch.equal(x.to_local(), whole[rank : rank + 1])
    assert torch.equal(x.to_global(), whole)
    moved = x.layout_convert(columns)
    assert torch.equal(moved.to_local(), whole.chunk(2, 1)[rank % 2])
    assert "S01R of (4, 8)" in repr(x)  # without a message
    # what is computed is computed with the whole, and its gradient is the piece of the serial one's
    local = whole[rank : rank + 1].clone().requires_grad_()
    y = DTensor(local, rows)
    assert y.T.shape == (8, 4)
    (y @ y.T + torch.exp(-y).sum()).sum().backward()
    serial = whole.clone().requires_grad_()
    (serial @ serial.T + torch.exp(-serial).sum()).sum().backward()
    assert local.grad is not None
    torch.testing.assert_close(local.grad, serial.grad[rank : rank + 1])  # type: ignore[index]
    # what is written is written into the piece
    x.mul_(2.0)
    assert torch.equal(x.to_global(), whole * 2)
    assert torch.zeros_like(x).shape == (1, 8)
    with pytest.raises(ShardingSpecException, match="cut it first, as"):
        x.add_(whole)
    with pytest.raises(ShardingSpecException, match="use layout_convert"):
        distribute_tensor(torch.ones(4, 4), square(grid, "S01R")).add_(
            distribute_tensor(torch.ones(4, 4), square(grid, "S10R"))
        )
    with pytest.raises(ShardingSpecException, match="distribute_tensor cuts a whole tensor"):
        DTensor(whole, rows)
    with pytest.raises(ShardingSpecException, match="does not fit"):
        distribute_tensor(whole.t(), rows)


def square(grid: DeviceMesh, text: str) -> Layout:
    return Layout(grid, "cpu", ShardingSpec(2, sharding_sequence=text), (4, 4))


def test_tensor() -> None:
    spawn(_tensor, 4)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    tied = nn.Linear(8, 8, bias=False)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), tied, nn.LayerNorm(8), tied)


def _module(rank: int, world_size: int, port: int) -> None:
    start(rank, world_size, port)
    grid = DeviceMesh(torch.arange(4), (2, 2))

    def cut(name: str, parameter: nn.Parameter) -> Layout | None:
        if name.startswith("3."):
            return None
        text = "S0S1" if parameter.ndim == 2 else "S01"
        return Layout(grid, "cpu", ShardingSpec(parameter.ndim, sharding_sequence=text), parameter.shape)

    serial, parts = model(), distribute_module(model(), cut)
    assert parts[2].weight is parts[4].weight
    assert parts[0].weight.shape == (4, 4)
    parts = copy.deepcopy(parts)
    assert parts[2].weight is parts[4].weight
    assert isinstance(parts[2].weight, nn.Parameter)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, foreach=f) for m, f in ((serial, None), (parts, False))
    ]
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = []
        for net, optimizer in zip((serial, parts), optimizers, strict=True):
            losses.append(net(x).square().sum())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[1], losses[0])
    for name, parameter in parts.named_parameters():
        found = parameter.to_global() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(found, serial.get_parameter(name))


def test_a_module_trains_like_the_serial_one() -> None:
    spawn(_module, 4)
