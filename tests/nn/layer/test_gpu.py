"""On a GPU: with one rank the layers compile in one piece, and modes on one shared GPU equal torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai.nn as col_nn
from colossalai.mesh import Mesh, shard
from colossalai.testing import spawn
from tests.nn.layer.world import MODES, close, size, whole

pytestmark = pytest.mark.gpu


class Tower(nn.Module):
    """Layer norms and MLPs."""

    def __init__(self, dim: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": col_nn.LayerNorm(dim),
                    "up": col_nn.Linear(dim, 4 * dim, role="expand"),
                    "down": col_nn.Linear(4 * dim, dim, role="contract"),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](nn.functional.gelu(block["up"](block["norm"](x))))
        return x


def test_one_graph_for_the_compiler() -> None:
    model = Tower().cuda().bfloat16()
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(8, 64, 1024, device="cuda", dtype=torch.bfloat16)
    compiled(x).sum().backward()
    close(compiled(x), model(x), "compiled", 2e-2)


def _modes(rank: int, world_size: int, port: int, name: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"tcp://127.0.0.1:{port}")
    tp = MODES[name]
    mesh = Mesh(tp.axes, "cuda")
    torch.manual_seed(0)
    up = col_nn.Linear(24, 48, role="expand", tp=tp, mesh=mesh)
    down = col_nn.Linear(48, 24, role="contract", tp=tp, mesh=mesh)
    norm = col_nn.LayerNorm(24, tp=tp, mesh=mesh)
    assert up.weight.is_cuda
    serial = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)).cuda()
    with torch.no_grad():
        for layer, other in ((norm, serial[0]), (up, serial[1]), (down, serial[3])):
            for (_, mine), (_, theirs) in zip(
                layer.named_parameters(), other.named_parameters(), strict=True
            ):
                theirs.copy_(whole(mine, mine, mesh))
    x = torch.randn(8, 4, 24, device="cuda")
    expected = serial(x)
    got = down(nn.functional.gelu(up(norm(shard(x, tp.hidden, mesh)))))
    close(got, shard(expected, tp.hidden, mesh), "output", 1e-4)
    expected.square().sum().backward()
    got.square().sum().backward()
    close(whole(up.weight.grad, up.weight, mesh), serial[1].weight.grad, "gradient", 1e-4)


@pytest.mark.parametrize("name", ["1d", "1d-sequence", "2d", "2.5d", "3d"])
def test_modes_on_one_gpu(name: str) -> None:
    spawn(_modes, size(name), name=name)
